"""What the pages point to exists: files, tests, the code that docs/protocol.md names, the rows that are tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.simulation.mutations import MUTATIONS

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WHAT_HAPPENS = ROOT / "docs" / "what-happens-when.md"
ON_A_CLUSTER = ROOT / "tests" / "cluster" / "test_what_happens_when.py"
PROTOCOL = ROOT / "docs" / "protocol.md"
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)\)")
_ANCHOR = re.compile(r"\]\(([^)#\s]*)#([^)\s]+)\)")
_CODE_LINK = re.compile(r"\[`(\w+(?:\.\w+)?)`\]\(([^)#\s]+\.py)\)")


def names_in(path: Path) -> Iterator[str]:
    """The functions of a module, and the methods of its classes behind their class."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef))


def section(title: str) -> str:
    return PROTOCOL.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_leads_somewhere(page: Path) -> None:
    targets = [target for _, target in _LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def anchors(page: Path) -> set[str]:
    """The anchors that the headings of a page get."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_to_a_part_of_a_page_leads_to_a_heading(page: Path) -> None:
    wanted = _ANCHOR.findall(page.read_text(encoding="utf-8"))
    links = [(page.parent / target if target else page, anchor) for target, anchor in wanted if "://" not in target]
    assert [f"{target.name}#{anchor}" for target, anchor in links if anchor not in anchors(target)] == []


def test_every_test_and_check_that_the_protocol_s_page_names_exists() -> None:
    cited = _CODE_LINK.findall(PROTOCOL.read_text(encoding="utf-8"))
    known = {target: set(names_in(PROTOCOL.parent / target)) for _, target in cited}
    assert len(cited) > 50
    assert [f"{target}: {name}" for name, target in cited if name not in known[target]] == []


def test_every_check_of_the_simulation_stands_on_the_protocol_s_page() -> None:
    checks = {name for name in names_in(ROOT / "tests" / "simulation" / "checks.py") if name.startswith("Checks.")}
    helpers = {"Checks.note", "Checks.fail", "Checks.committed", "Checks.joined"}
    public = {name for name in checks if not name.startswith("Checks._")} - helpers
    assert public == set(re.findall(r"`(Checks\.\w+)`", section("What must always hold, and what guards it")))


def test_each_mutation_stands_beside_the_rule_that_it_takes_out() -> None:
    rows = re.findall(r"^\| .+ \| `(\w+)` \|$", section("Which rule is needed for what?"), re.MULTILINE)
    assert sorted(rows) == sorted(mutation.__name__ for mutation in MUTATIONS)


def test_the_code_that_the_protocol_s_page_names_exists() -> None:
    source = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("trainer_image/fthsdp", "tests")
        for path in (ROOT / folder).rglob("*.py")
    )
    table = section("Who decides what?")
    names = {name.rpartition(".")[2] for name in re.findall(r"`(\w+(?:\.\w+)?)`", table) if ".py" not in name}
    assert names >= {"_voted", "how_to_enter"}
    assert [name for name in names if not re.search(rf"(def|class) {name}\b", source)] == []


def test_each_row_about_kubernetes_is_a_test_on_a_cluster_and_each_of_these_a_row() -> None:
    table = WHAT_HAPPENS.read_text(encoding="utf-8").partition("\n## On Kubernetes\n")[2]
    rows = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[2:]  # after the head and the line below it
    names = [f"test_{re.sub('[^a-z0-9]+', '_', row.lower())}" for row in rows]
    assert len(names) > 10
    assert sorted(names) == sorted(name for name in names_in(ON_A_CLUSTER) if name.startswith("test_"))


def test_the_images_that_the_readme_builds_are_those_that_the_chart_and_the_examples_name() -> None:
    chart = ROOT / "charts" / "fthsdp-operator"
    version = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"]
    repository = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))["image"]["repository"]
    jobs = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "examples").glob("*.yaml"))]
    trainers = {job["spec"]["template"]["spec"]["containers"][0]["image"] for job in jobs}
    wanted = {f"{repository}:{version}", *trainers}
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## On a cluster\n")[2].partition("\n## ")[0]
    built = re.findall(r"docker build --target \w+ +-t (\S+)", section)
    loaded = re.findall(r"kind load docker-image (.+)", section)
    assert set(built) == wanted == set(loaded[0].split())
    assert section.index("docker build") < section.index("helm install") < section.index("kubectl apply")
