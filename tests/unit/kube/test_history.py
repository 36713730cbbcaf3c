"""What a chart is upgraded from: the newest commit that has another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.kube.images import BUILD_INPUTS
from tests.cluster.kube.shell import run
from tests.upgrade.history import NoHistoryError, check_out_before

MADE_OF = ("charts/chart.yaml", "examples/job.yaml", *BUILD_INPUTS)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Give a checkout of four commits: the second one changed the chart, the others only code."""
    folder = tmp_path / "project"
    for name in MADE_OF:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("0")
    git(folder, "init", "--quiet")
    commit(folder, "operator", "1")
    commit(folder, "charts/chart.yaml", "2")
    commit(folder, "operator", "3")
    commit(folder, "operator", "4")
    return folder


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false")
    return run("git", "-C", folder, *who, *arguments)


def commit(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", f"--message={text}")


def before(project: Path, folder: Path) -> tuple[str, str]:
    """Return what the chart and the operator were."""
    folder.mkdir()
    check_out_before(folder, project=project)
    assert {path.name for path in folder.iterdir()} == {name.partition("/")[0] for name in MADE_OF}
    return (folder / "charts/chart.yaml").read_text(), (folder / "operator").read_text()


def test_before_is_the_commit_before_the_one_that_changed_the_chart(project: Path, tmp_path: Path) -> None:
    assert before(project, tmp_path / "before") == ("0", "1")


def test_before_is_the_newest_commit_while_a_change_of_the_chart_is_not_committed(
    project: Path, tmp_path: Path
) -> None:
    (project / "charts/chart.yaml").write_text("5")
    assert before(project, tmp_path / "before") == ("2", "4")


def test_a_copy_without_history_says_so(project: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{project}", "shallow")
    for folder in (tmp_path / "shallow", tmp_path):
        with pytest.raises(NoHistoryError, match="what was before the chart was changed last is not to be had"):
            check_out_before(tmp_path, project=folder)
