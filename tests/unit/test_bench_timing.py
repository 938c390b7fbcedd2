"""How calls are timed on the CPU."""

import time

import pytest
import torch

from tilewise.bench import timing
from tilewise.bench.clocks import ClockSampler
from tilewise.bench.timing import REGIMES, Regime, Timing, measure, regime_named
from tilewise.errors import InvalidInput

CPU = torch.device("cpu")


def measured(calls, regime):
    with ClockSampler(CPU) as clocks:
        return measure(calls, regime, CPU, clocks)


def test_percentiles_are_those_of_all_samples():
    summary = Timing.of([float(value) for value in range(11, 0, -1)])
    assert (summary.p20, summary.p50, summary.p80, summary.samples) == (3.0, 6.0, 9.0, 11)


def test_one_sample_is_its_own_percentiles():
    assert Timing.of([2.5]) == Timing(2.5, 2.5, 2.5, 1)


def test_every_provider_has_a_turn_a_round_and_the_order_rotates():
    log = []
    calls = {name: (lambda name=name: log.append(name) or time.sleep(0.002)) for name in "abc"}
    times = measured(calls, Regime("test", turns=3, burst=1.0, least_warmups=0, least_calls=1))
    turns = log[len(calls):]  # one call each was for the estimate
    assert turns == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert {name: result.samples for name, result in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_slow_provider_sits_out_once_it_has_been_timed_enough():
    calls = {"slow": lambda: time.sleep(0.02), "fast": lambda: None}
    regime = Regime("test", turns=5, burst=0.1, least_warmups=0, least_calls=1, enough_calls=2, enough_time=30.0)
    times = measured(calls, regime)
    assert times["slow"].samples == 2
    assert times["fast"].samples > times["slow"].samples


def test_a_call_is_not_timed_shorter_than_it_takes():
    times = measured({"sleep": lambda: time.sleep(0.01)}, REGIMES["turns"])
    assert times["sleep"].p20 >= 10.0


def test_the_sustained_regime_counts_the_second_half(monkeypatch):
    monkeypatch.setattr(timing, "_SUSTAINED_REST", 0.0)
    monkeypatch.setattr(timing, "_SUSTAINED_RUN", 0.2)
    calls = []

    def slow_at_first():
        time.sleep(0.02 if len(calls) < 4 else 0.01)
        calls.append(None)

    result = measured({"call": slow_at_first}, REGIMES["sustained"])["call"]
    assert result.samples >= 2
    assert 10.0 <= result.p50 < 18.0


def test_the_default_regime_follows_the_device():
    assert regime_named(None, CPU).name == "turns"
    assert regime_named(None, torch.device("cuda")).name == "duty"
    with pytest.raises(InvalidInput, match=r"'fast'.*duty"):
        regime_named("fast", CPU)


def test_without_a_gpu_clock_readings_are_empty():
    result = measured({"call": lambda: None}, Regime("test", turns=1, burst=0.1))["call"]
    assert (result.clocks.sm_mhz, result.clocks.power_w) == (None, None)
