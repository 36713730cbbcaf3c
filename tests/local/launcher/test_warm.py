"""An interpreter that waits: it runs a program as python itself does, and where it cannot, a cold start does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.local.launcher.conftest import DEADLINE, Container, ended, template_of

import fthsdp
from fthsdp.launcher.command import Program, program_of

pytestmark = pytest.mark.local

PROBE = """
import json, sys, threading
def shown():
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0], "same": main.__dict__ is globals(),
        "spec": getattr(main.__spec__, "name", None), "package": __package__, "flags": list(sys.flags),
        "threads": threading.active_count(), "stdin": sys.stdin.read(), "modules": "_pydecimal" in sys.modules,
    }
print(json.dumps(shown()))
"""


@pytest.mark.parametrize(
    "words",
    [
        ("probe.py", "a", "-b"),
        ("-u", "probe.py"),
        ("-X", "utf8", "-O", "-Wignore", "probe.py", "-m", "x"),
        ("-m", "package.probe", "--steps", "5"),
        ("-P", "-m", "package.probe"),
        ("-I", "probe.py"),
    ],
)
def test_a_program_finds_what_it_finds_in_an_interpreter_of_its_own(
    container: Container, words: tuple[str, ...]
) -> None:
    folder = container.folder / "code"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "__init__.py").touch()
    for place in (folder, folder / "package"):
        (place / "probe.py").write_text(PROBE)
    home = str(Path(fthsdp.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([home, str(folder)])}
    command = [sys.executable, *words]
    plain = output(command, folder, env)
    ours = {"FTHSDP_ATTEMPT_FILE": "none", "FTHSDP_PRELOAD": "_pydecimal", "FTHSDP_ATTEMPT": "0"}
    warm = output([sys.executable, "-m", "fthsdp.launcher", "--", *command], folder, env | ours)
    assert plain["modules"] is False
    assert warm == {**plain, "modules": True}


def output(command: list[str], folder: Path, env: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("import sys; sys.exit('it is over')", 1, "it is over"),
        ("import sys; sys.exit(5)", 5, ""),
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("def f(:", 1, "SyntaxError"),
        ("import atexit, os; atexit.register(os._exit, 11)", 11, ""),
        ("import os; os.kill(os.getpid(), 6)", 134, ""),
        ("import threading, os; threading.Timer(0.2, os._exit, [12]).start()", 12, ""),
    ],
)
def test_a_program_ends_as_it_does_in_an_interpreter_of_its_own(
    container: Container, script: str, code: int, said: str
) -> None:
    (container.folder / "main.py").write_text(script)
    container.preload = "_pydecimal"
    got, errors = ended(container.run(sys.executable, str(container.folder / "main.py"), unusual={"patience": 0.0}))
    assert got == code
    assert said in errors


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python a.py", ("python", "script", "a.py", "")),
        ("/v/bin/python3.11 -u -Xdev -W no a.py --b", ("/v/bin/python3.11 -u -Xdev -W no", "script", "a.py", "--b")),
        ("python3 -m a.b -c", ("python3", "module", "a.b", "-c")),
        ("python -c pass", None),
        ("python", None),
        ("python -", None),
        ("python -m", None),
        ("python -X", None),
        ("python folder", None),
        ("python --check-hash-based-pycs always a.py", None),
        ("torchrun a.py", None),
        ("sh -c x", None),
        ("pythonw a.py", None),
    ],
)  # fmt: skip
def test_only_commands_that_are_surely_a_python_program_are_taken_for_one(
    command: str, program: tuple[str, str, str, str] | None
) -> None:
    found = program_of(command.split())
    if program is None:
        assert found is None
        return
    interpreter, kind, name, arguments = program
    assert found == Program(
        interpreter=tuple(interpreter.split()),
        kind="module" if kind == "module" else "script",
        name=name,
        arguments=tuple(arguments.split()),
    )


# --- where it cannot ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "started 1 threads"),
        ("raise RuntimeError('not today')", "import mine: RuntimeError: not today"),
        ("import os; os.kill(os.getpid(), 9)", "it ended"),
        ("import sys; sys.exit(0)", "it ended"),
    ],
)
def test_an_interpreter_that_cannot_be_forked_means_a_cold_start_and_says_why(
    container: Container, module: str, why: str
) -> None:
    (container.folder / "mine.py").write_text(module)
    (container.folder / "main.py").write_text("import sys; print('cold' if 'mine' not in sys.modules else 'warm')")
    container.preload = "mine"
    launcher = container.run(sys.executable, str(container.folder / "main.py"))
    out, errors = launcher.communicate(timeout=30)
    assert (launcher.returncode, out) == (0, "cold\n"), errors
    assert "no interpreter waits for this command: " in errors
    assert why in errors or (why == "it ended" and "it has ended" in errors)


@pytest.mark.parametrize(
    "module", ["import threading; threading.Event().wait()", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]
)
def test_an_interpreter_that_hangs_or_is_frozen_while_it_imports_means_a_cold_start(
    container: Container, module: str
) -> None:
    (container.folder / "mine.py").write_text(module)
    (container.folder / "main.py").touch()
    container.preload = "mine"
    launcher = container.run(sys.executable, str(container.folder / "main.py"), unusual={"import_timeout": 0.5})
    code, errors = ended(launcher)
    assert code == 0
    assert "no interpreter waits for this command: it has not imported everything within 0.5 s" in errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_interpreter_that_was_killed_or_frozen_means_a_cold_start(
    container: Container, number: signal.Signals
) -> None:
    container.preload = "_pydecimal"
    launcher = container.child("wait", "0")
    (first,) = container.born(1)
    assert first["warm"]
    os.kill(template_of(launcher.pid), number)
    container.says(1)
    code, errors = ended(launcher)
    assert code == 0
    assert not container.born(2)[1]["warm"]
    assert "no interpreter waits for this command" in errors
    assert "attempt 1 starts in place\n" in errors


def test_the_memory_of_each_attempt_is_a_fresh_one(container: Container) -> None:
    main = container.folder / "main.py"
    main.write_text(
        "import os, sys, _pydecimal, random\n"
        "print(hasattr(_pydecimal, 'mark'), random.random(), flush=True)\n"
        "_pydecimal.mark = True\n"
        "sys.exit(3 if os.environ['FTHSDP_ATTEMPT'] == '0' else 0)\n"
    )
    container.preload = "_pydecimal,random"
    launcher = container.run(sys.executable, str(main))
    assert launcher.stdout is not None
    first = launcher.stdout.readline().split()
    container.says(1)
    second = launcher.stdout.readline().split()
    assert ended(launcher)[0] == 0
    assert (first[0], second[0]) == ("False", "False")
    assert first[1] != second[1]


def test_a_missing_script_is_said_as_python_says_it(container: Container, tmp_path: Path) -> None:
    container.preload = "_pydecimal"
    code, errors = ended(container.run(sys.executable, str(tmp_path / "none.py"), unusual={"patience": 0.0}))
    assert code != 0
    assert "No such file or directory" in errors
