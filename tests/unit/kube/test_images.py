"""What goes into the images that the cluster tests run."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest
from tests.cluster.kube.archive import pack_image
from tests.cluster.kube.images import BUILD_INPUTS, PROJECT, build_inputs, inputs_hash, pip_settings, remove_older


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in BUILD_INPUTS:
        if (PROJECT / name).is_dir():
            (tmp_path / name / "inside").mkdir(parents=True)
            (tmp_path / name / "inside" / "module.py").write_text("x = 1\n")
        else:
            (tmp_path / name).write_text(name)
    return tmp_path


def hashed(project: Path) -> str:
    with build_inputs(project) as context:
        return inputs_hash(context)


def test_a_change_of_anything_that_is_built_makes_another_image(project: Path) -> None:
    before = hashed(project)
    assert hashed(project) == before
    for path in [path for path in project.rglob("*") if path.is_file()]:
        text = path.read_text()
        path.write_text(text + "#")
        assert hashed(project) != before, path
        path.write_text(text)


def test_what_python_leaves_behind_makes_no_other_image(project: Path) -> None:
    before = hashed(project)
    (project / "operator" / "__pycache__").mkdir()
    (project / "operator" / "__pycache__" / "module.pyc").write_bytes(b"")
    (project / "notes.txt").write_text("not built")
    assert hashed(project) == before


def test_a_build_reaches_the_index_as_this_machine_does() -> None:
    listing = "global.index-url='https://mirror/simple'\n:env:.default-timeout='180'\nglobal.no-cache-dir='true'\n"
    settings = pip_settings(listing + "global.cert='/etc/here.pem'\n")
    assert dict(settings["global"]) == {
        "cert": "/run/secrets/certificates",
        "index-url": "https://mirror/simple",
        "timeout": "180",
    }


def test_an_archive_names_its_image_and_its_command(tmp_path: Path) -> None:
    (tmp_path / "program").write_text("program")
    with tarfile.open(tmp_path / "layer.tar", "w") as layer:
        layer.add(tmp_path / "program", arcname="program")
    pack_image("localhost/thing:1", tmp_path / "layer.tar", ["/program"], tmp_path / "image.tar")
    with tarfile.open(tmp_path / "image.tar") as image:
        (manifest,) = json.loads(read(image, "manifest.json"))
        config = json.loads(read(image, manifest["Config"]))
        assert manifest["RepoTags"] == ["localhost/thing:1"]
        assert config["config"]["Cmd"] == ["/program"]
        assert config["rootfs"]["diff_ids"] == ["sha256:" + manifest["Layers"][0].partition("/")[0]]


def test_the_images_that_were_asked_for_last_are_kept(tmp_path: Path) -> None:
    for asked, name in enumerate(("operator-1.tar", "operator-3.tar", "operator-2.tar", "trainer-1.tar")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (asked, asked))
    remove_older(tmp_path, "operator")
    assert {path.name for path in tmp_path.iterdir()} == {"operator-2.tar", "operator-3.tar", "trainer-1.tar"}


def read(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file
    return file.read()
