"""PrometheusWriter, scraped over HTTP and read by the parser of prometheus_client."""

from __future__ import annotations

import math
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from support.packages import import_or_skip

from torchhooks import MonitoredLoop, PrometheusWriter, StopAtStepHook, SummarySaverHook
from torchhooks.common.files import PLACES


@pytest.fixture(autouse=True)
def _needs_prometheus() -> None:
    import_or_skip("prometheus_client")


def scrape(port: int) -> dict[str, tuple[float, dict[str, str]]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    families = list(import_or_skip("prometheus_client.parser").text_string_to_metric_families(text))
    assert all(family.type == "gauge" for family in families)
    return {sample.name: (sample.value, sample.labels) for family in families for sample in family.samples}


def test_a_running_loop_answers_with_its_newest_values() -> None:
    with PrometheusWriter(0, run="mnist", addr="127.0.0.1") as writer:
        hook = SummarySaverHook(every_n_steps=2, summary_writer=writer, summary_op={"val/loss": "loss", "n": "n"})
        step = lambda number: {"loss": torch.tensor(1.0 / number), "n": math.inf}  # noqa: E731
        with MonitoredLoop(step, hooks=[hook, StopAtStepHook(last_step=5)]) as loop:
            for number in loop.until_stop(range(1, 10)):
                loop.run(number)
                if number == 3:
                    found = scrape(writer.port)
                    assert found["torchhooks_val_loss"] == (0.5, {"run": "mnist", "rank": "0"})
                    assert found["torchhooks_step"][0] == 2
        found = scrape(writer.port)
    assert found["torchhooks_val_loss"][0] == 0.25
    assert found["torchhooks_n"][0] == math.inf
    assert found["torchhooks_step"][0] == 4
    assert abs(found["torchhooks_time_seconds"][0] - time.time()) < 60


@pytest.mark.slow
def test_the_port_is_opened_by_the_first_point_and_again_by_one_after_close() -> None:
    writer = PrometheusWriter(0, rank=3, addr="127.0.0.1")
    assert writer.port == 0
    writer.add_scalar("loss", 1.0, 7)
    assert scrape(writer.port)["torchhooks_loss"] == (1.0, {"run": "", "rank": "3"})
    writer.close()
    writer.close()
    with pytest.raises(urllib.error.URLError):
        scrape(writer.port)
    with writer:
        writer.add_scalar("loss", 2.0, 8)
        assert scrape(writer.port)["torchhooks_loss"][0] == 2.0


@pytest.mark.slow
def test_two_writers_can_have_the_same_tag() -> None:
    with PrometheusWriter(0, run="a", addr="127.0.0.1") as one, PrometheusWriter(0, run="b", addr="127.0.0.1") as other:
        one.add_scalar("loss", 1.0, 1)
        other.add_scalar("loss", 2.0, 1)
        assert scrape(one.port)["torchhooks_loss"] == (1.0, {"run": "a", "rank": "0"})
        assert scrape(other.port)["torchhooks_loss"] == (2.0, {"run": "b", "rank": "0"})


@pytest.mark.parametrize(
    ("tag", "other"),
    [
        ("val/loss", "val_loss"),
        pytest.param("loss", "step", marks=pytest.mark.exhaustive),
        pytest.param("loss", "time_seconds", marks=pytest.mark.exhaustive),
    ],
)
def test_two_tags_of_one_name_are_refused(tag: str, other: str) -> None:
    with PrometheusWriter(0, addr="127.0.0.1") as writer:
        writer.add_scalar(tag, 1.0, 1)
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            writer.add_scalar(other, 1.0, 1)


def test_before_the_first_point_the_time_is_that_of_the_start() -> None:
    with PrometheusWriter(0, addr="127.0.0.1") as writer:
        writer.start_run()
        assert abs(scrape(writer.port)["torchhooks_time_seconds"][0] - time.time()) < 60


def test_a_port_that_is_taken_is_an_error_of_the_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        writer = PrometheusWriter(taken.getsockname()[1], addr="127.0.0.1")
        hook = SummarySaverHook(every_n_steps=2, summary_writer=writer, summary_op={"loss": "loss"})
        with pytest.raises(OSError, match="in use"):
            MonitoredLoop(lambda: 1.0, hooks=[hook])


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install torchhooks\[prometheus\], or pip install prometheus_client"):
        PrometheusWriter(0)


def test_under_check_the_port_of_the_real_training_run_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLACES, str(tmp_path))
    with socket.socket() as real:
        real.bind(("127.0.0.1", 0))
        real.listen()
        with PrometheusWriter(real.getsockname()[1]) as writer:
            writer.add_scalar("loss", 0.5, 1)
            assert scrape(writer.port)["torchhooks_loss"][0] == 0.5
