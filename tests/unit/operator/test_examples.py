"""What people copy can be understood."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fthsdp_operator.api import parse_job

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_an_example_is_a_job_that_is_named_as_its_file_is(path: Path) -> None:
    assert parse_job(yaml.safe_load(path.read_text())).name == path.stem
