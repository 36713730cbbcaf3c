"""A line of the log says which job it speaks of, and which replica and attempt where it is about one."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import datetime

import pytest
from tests.unit.operator.world import NAME, NAMESPACE, World

from fthsdp_operator.process import logs


def lines(captured: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in captured.splitlines()]


def test_a_json_line_has_time_level_logger_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(logs.Level.INFO, logs.LogFormat.JSON)
    logging.getLogger("a.b").warning("%d of %d", 1, 2)
    (line,) = lines(capsys.readouterr().err)
    assert datetime.fromisoformat(str(line.pop("time"))).tzinfo is not None
    assert line == {"level": "warning", "logger": "a.b", "message": "1 of 2"}


def test_what_is_said_about_a_job_names_it_whoever_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(logs.Level.INFO, logs.LogFormat.JSON)
    with logs.about(namespace="team", job="llama"):
        logging.getLogger("some.library").info("retrying", extra={"replica": 2, "attempt": None})
    logging.getLogger("some.library").info("idle")
    about, idle = lines(capsys.readouterr().err)
    assert (about["namespace"], about["job"], about["replica"]) == ("team", "llama", 2)
    assert "attempt" not in about
    assert idle.keys() == {"time", "level", "logger", "message"}


def test_a_traceback_stays_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(logs.Level.INFO, logs.LogFormat.JSON)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("a").exception("it failed")
    (line,) = lines(capsys.readouterr().err)
    assert str(line["exception"]).endswith("ValueError: two\nlines")


def test_jobs_that_are_reconciled_side_by_side_do_not_get_each_others_names(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(logs.Level.INFO, logs.LogFormat.JSON)

    async def work(job: str, both: asyncio.Barrier) -> None:
        with logs.about(namespace="team", job=job):
            await both.wait()
            logging.getLogger("a").info("I am %s", job)

    async def story() -> None:
        both = asyncio.Barrier(2)
        await asyncio.gather(work("a", both), work("b", both))

    asyncio.run(story())
    assert {(line["job"], line["message"]) for line in lines(capsys.readouterr().err)} == {
        ("a", "I am a"),
        ("b", "I am b"),
    }


def test_text_is_a_line_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(logs.Level.WARNING, logs.LogFormat.TEXT)
    logging.getLogger("a").info("not shown")
    logging.getLogger("a").warning("shown")
    assert capsys.readouterr().err.endswith(" WARNING a: shown\n")


@pytest.mark.parametrize(("level", "shown"), [(logs.Level.INFO, 0), (logs.Level.DEBUG, 1)])
def test_what_kopf_says_of_each_event_is_for_debugging(
    level: logs.Level, shown: int, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(level, logs.LogFormat.JSON)
    logging.getLogger("kopf.objects").info("Handler 'pod' succeeded.")
    assert len(lines(capsys.readouterr().err)) == shown


def test_a_failure_is_logged_with_its_replica_and_the_attempt_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.exits("r1-a0-0", 1)
        await world.look()
        world.kubelets_start_everything()
        world.everybody_trains()
        await world.look()

    logs.configure(logs.Level.INFO, logs.LogFormat.JSON)
    asyncio.run(story())
    told = [line for line in lines(capsys.readouterr().err) if line.get("replica") == 1]
    failed, back = [line for line in told if f"{NAMESPACE}/{NAME}" in str(line["message"])][-2:]
    assert "ReplicaFailed" in str(failed["message"])
    assert failed["attempt"] == 0
    assert "ReplicaActive" in str(back["message"])
    assert back["attempt"] == 1
