"""The HOROVOD_* variables: values, defaults, complaints, and the manual's table of them."""

from __future__ import annotations

import dataclasses
import logging
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

import hvdtrain
from hvdtrain.hvd.engine import settings
from hvdtrain.hvd.engine.settings import HONOURED, IGNORED, OWN, Settings

MANUAL = Path(hvdtrain.__file__).parents[1] / "docs" / "horovod-api.md"


def test_an_empty_environment_gives_horovods_defaults() -> None:
    assert Settings.from_env({}) == Settings()
    assert dataclasses.asdict(Settings()) == {
        "fusion_threshold": None,
        "timeline": None,
        "timeline_mark_cycles": False,
        "stall_check_disable": False,
        "stall_check_time_s": 60.0,
        "stall_shutdown_time_s": 0.0,
        "dynamic_process_sets": False,
        "elastic": False,
        "elastic_timeout_s": 600.0,
        "gloo_timeout_s": 30.0,
        "gloo_iface": None,
        "log_level": None,
        "transport": "auto",
        "peer_limit_s": 0.0,
        "exact_horovod": False,
        "ignored": (),
    }
    assert Settings.from_env(dict.fromkeys([*HONOURED, *IGNORED], "")) == Settings()


ROWS: list[tuple[str, str, str, object]] = [
    ("HOROVOD_FUSION_THRESHOLD", "1048576", "fusion_threshold", 1 << 20),
    ("HOROVOD_FUSION_THRESHOLD", "0", "fusion_threshold", 0),
    ("HOROVOD_TIMELINE", "/tmp/x.json", "timeline", "/tmp/x.json"),
    ("HOROVOD_TIMELINE", "DYNAMIC", "timeline", settings.DYNAMIC),
    ("HOROVOD_TIMELINE_MARK_CYCLES", "1", "timeline_mark_cycles", True),
    ("HOROVOD_STALL_CHECK_DISABLE", "1", "stall_check_disable", True),
    ("HOROVOD_STALL_CHECK_TIME_SECONDS", "2", "stall_check_time_s", 2.0),
    ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0.5", "stall_shutdown_time_s", 0.5),
    ("HOROVOD_DYNAMIC_PROCESS_SETS", "1", "dynamic_process_sets", True),
    ("HOROVOD_ELASTIC", "1", "elastic", True),
    ("HOROVOD_ELASTIC_TIMEOUT", "45", "elastic_timeout_s", 45.0),
    ("HOROVOD_GLOO_TIMEOUT_SECONDS", "90", "gloo_timeout_s", 90.0),
    ("HOROVOD_GLOO_IFACE", "eth0", "gloo_iface", "eth0"),
    ("HOROVOD_LOG_LEVEL", "DEBUG", "log_level", "debug"),
    ("HVDTRAIN_TRANSPORT", "gloo", "transport", "gloo"),
    ("HVDTRAIN_EXACT_HOROVOD", "1", "exact_horovod", True),
]


@pytest.mark.parametrize(("name", "text", "field", "value"), ROWS)
def test_each_honoured_variable(name: str, text: str, field: str, value: object) -> None:
    found = dataclasses.asdict(Settings.from_env({name: text}))
    assert found == {**dataclasses.asdict(Settings()), field: value}


def test_every_honoured_variable_is_tested() -> None:
    assert {name for name, *_ in ROWS} == {*HONOURED, *OWN}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("2x", True), (" 1", True), ("+1", True), ("0", False), ("-1", False)]
    + [(text, False) for text in ("true", "True", "yes", "on", "x1", "")],
)
def test_a_boolean_is_what_strtol_makes_of_it(text: str, value: bool) -> None:
    assert Settings.from_env({"HOROVOD_ELASTIC": text}).elastic is value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "64MB"),
        ("HOROVOD_FUSION_THRESHOLD", "-1"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "soon"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "nan"),
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "inf"),
        ("HOROVOD_LOG_LEVEL", "loud"),
        ("HVDTRAIN_TRANSPORT", "pigeon"),
    ],
)
def test_a_bad_value_is_named_with_its_variable(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=.*{text.rpartition(',')[2]}.* must be "):
        Settings.from_env({name: text})


def test_what_is_ignored_is_reported() -> None:
    """But for what asks for what is done anyway."""
    assert Settings.from_env(dict.fromkeys(IGNORED, "7")).ignored == tuple(IGNORED)
    horovodrun = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "GLOO"}
    off = {"HOROVOD_AUTOTUNE": "0", "HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}
    assert Settings.from_env({**horovodrun, **off, "HOROVOD_RANK": "0"}).ignored == ()


def test_what_is_ignored_is_logged_once_and_on_rank_0(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = Settings.from_env(
        {"HOROVOD_CONTROLLER": "mpi", "DDL_OPTIONS": "x", "HVDTRAIN_EXACT_HOROVOD": "1"}
    )
    settings._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        settings.announce(found, 1)
        assert caplog.messages == []
        for _ in range(2):
            settings.announce(found, 0)
    *ignored, exact = caplog.messages
    assert exact.startswith("HVDTRAIN_EXACT_HOROVOD=1: ")
    assert ignored == [
        f"{name} has no effect: {IGNORED[name]}" for name in ("HOROVOD_CONTROLLER", "DDL_OPTIONS")
    ]


def test_the_log_level_is_the_loggers() -> None:
    logger = logging.getLogger("hvdtrain")
    before = logger.level
    try:
        settings.apply_log_level(Settings())
        assert logger.level == before
        settings.apply_log_level(Settings(log_level="fatal"))
        assert logger.level == logging.CRITICAL
    finally:
        logger.setLevel(before)


def test_every_variable_is_in_one_row_of_the_manual() -> None:
    rows = re.findall(
        r"^\| `(\w+\*?)` \| (honoured|ignored|own) \|", MANUAL.read_text(), re.MULTILINE
    )
    known = {
        **dict.fromkeys(HONOURED, "honoured"),
        **dict.fromkeys(OWN, "own"),
        **dict.fromkeys(IGNORED, "ignored"),
    }
    found = {name: [word for row, word in rows if fnmatch(name, row)] for name in known}
    assert found == {name: [word] for name, word in known.items()}
    assert [row for row, _ in rows if not any(fnmatch(name, row) for name in known)] == []
