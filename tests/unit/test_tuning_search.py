"""What is proposed, and what is chosen of it: with a trial whose times are given, no device."""

from dataclasses import replace

import pytest
import torch

from tilewise.kernels.triton.config import ForwardConfig
from tilewise.masks import Mask
from tilewise.problem import AttentionProblem
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.heuristics_triton import tile_heuristic
from tilewise.tuning.kinds import KINDS
from tilewise.tuning.search import HOPELESS, MOST_CANDIDATES, ROUNDS, Fault, Proposals, propose, search

HOPPER = DeviceSpec.of_arch("sm_90")
OWN, OTHER, THIRD = (ForwardConfig(block, 64, 4, 2) for block in (64, 128, 32))


def problem_of(d=128, dtype=torch.bfloat16):
    return AttentionProblem(b=1, hq=2, hk=2, sq=4096, sk=4096, d=d, dv=d, dtype=dtype,
                            device=torch.device("cuda", 0), scale=1.0, mask=Mask())


class GivenTimes:
    """A trial that knows its answers; ``turns`` holds what was timed, round by round."""

    def __init__(self, times, faults=None):
        self.times, self.faults, self.turns = times, faults or {}, []

    def fault(self, config):
        return self.faults.get(config)

    def time(self, configs):
        self.turns.append(tuple(configs))
        return [self.times[config] for config in configs]


def search_plain(times, faults=None):
    trial = GivenTimes(times, faults)
    return search(trial, Proposals((OWN, OTHER, THIRD), OWN, None)), trial


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("kernel", KINDS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_proposals_are_few_distinct_and_fit_with_the_heuristics_tiles_first(arch, kernel, d, dtype):
    device, problem = DeviceSpec.of_arch(arch), problem_of(d, dtype)
    proposals = propose(kernel, problem, device, descriptors=arch == "sm_90")
    assert 1 <= len(proposals.tiles) <= MOST_CANDIDATES
    assert len(proposals.tiles) >= 10 or arch == "gfx942"  # whose 64 KiB hold few tiles of a wide head
    assert len(set(proposals.tiles)) == len(proposals.tiles)
    assert all(type(config) is KINDS[kernel] for config in proposals.tiles)
    assert all(config.shared_bytes(problem) <= device.shared_memory for config in proposals.tiles[2:])
    own = {tile_heuristic(kernel, problem, device, descriptors=way) for way in (False, arch == "sm_90")}
    assert set(proposals.tiles[:len(own)]) == own


def test_descriptors_are_proposed_only_where_they_are_permitted_and_elements_have_16_bits():
    permitted = propose("dq", problem_of(), HOPPER, descriptors=True)
    assert {config.descriptors for config in permitted.tiles} == {True, False}
    assert permitted.described == tile_heuristic("dq", problem_of(), HOPPER, descriptors=True)
    for proposals in (propose("dq", problem_of(), HOPPER, descriptors=False),
                      propose("dq", problem_of(dtype=torch.float32), HOPPER, descriptors=True)):
        assert proposals.described is None
        assert not any(config.descriptors for config in proposals.tiles)


def test_tiles_nearer_to_the_heuristics_come_first():
    proposals = propose("forward", problem_of(), DeviceSpec.of_arch("sm_80"), descriptors=False)
    own = proposals.plain
    places = [proposals.tiles.index(replace(own, **change)) for change in (
        {}, {"num_stages": own.num_stages - 1}, {"num_warps": 8, "num_stages": own.num_stages - 1})]
    assert places == sorted(places)


def test_a_larger_tile_comes_with_more_warps_first_and_a_slimmer_one_before_a_smaller():
    tiles = propose("forward", problem_of(64), DeviceSpec.of_arch("sm_80"), descriptors=False).tiles
    own = tiles[0]
    assert (own.block_m, own.block_n, own.num_warps) == (128, 64, 4)
    wide, crowded, slim, small = (tiles.index(replace(own, **change)) for change in (
        {"block_n": 128, "num_warps": 8}, {"block_n": 128}, {"block_m": 64, "block_n": 128},
        {"block_m": 64, "block_n": 64, "num_stages": 2}))
    assert wide < crowded
    assert slim < small


@pytest.mark.parametrize("most", [1, 5])
def test_a_cut_keeps_the_heuristics_tiles(most):
    whole = propose("forward", problem_of(), HOPPER, descriptors=True)
    cut = propose("forward", problem_of(), HOPPER, descriptors=True, most=most)
    assert cut.tiles == whole.tiles[:max(most, 2)]
    assert {whole.plain, whole.described} <= set(cut.tiles)


def test_the_fastest_tile_is_chosen_beside_the_heuristics_time():
    finding, _ = search_plain({OWN: 1.0, OTHER: 0.9, THIRD: 1.2})
    (choice,) = finding.choices
    assert (choice.config, choice.ms, choice.heuristic_ms, choice.candidates) == (OTHER, 0.9, 1.0, 3)


@pytest.mark.parametrize(("ms", "chosen"), [(0.985, OWN), (0.975, OTHER)])
def test_a_gain_below_two_percent_leaves_the_heuristics_tile(ms, chosen):
    finding, _ = search_plain({OWN: 1.0, OTHER: ms, THIRD: 1.2})
    (choice,) = finding.choices
    assert choice.config == chosen
    assert choice.ms == (1.0 if chosen is OWN else ms)


def test_a_tile_with_a_fault_is_recorded_and_neither_timed_nor_chosen():
    finding, trial = search_plain({OWN: 1.0, THIRD: 1.2}, {OTHER: "wrong"})
    assert finding.faults == (Fault(OTHER, "wrong"),)
    assert finding.choices[0].config == OWN
    assert all(OTHER not in turn for turn in trial.turns)


def test_without_the_heuristics_tile_the_fastest_is_chosen_and_no_time_invented():
    finding, _ = search_plain({OTHER: 1.0, THIRD: 1.2}, {OWN: "out of resources"})
    assert finding.choices[0].config == OTHER
    assert finding.choices[0].heuristic_ms is None


def test_when_every_tile_has_a_fault_nothing_is_chosen():
    finding, trial = search_plain({}, dict.fromkeys((OWN, OTHER, THIRD), "broken"))
    assert finding.choices == ()
    assert len(finding.faults) == 3
    assert trial.turns == []


def test_rounds_interleave_the_tiles_in_turned_order():
    _, trial = search_plain({OWN: 1.0, OTHER: 1.1, THIRD: 1.2})
    assert len(trial.turns) == ROUNDS
    assert all(set(turn) == {OWN, OTHER, THIRD} for turn in trial.turns)
    assert len({turn[0] for turn in trial.turns}) == 3


def test_the_hopeless_are_timed_once_but_never_the_heuristics_tile():
    _, trial = search_plain({OWN: 5.0, OTHER: 1.0, THIRD: 1.01 * HOPELESS})
    assert THIRD in trial.turns[0]
    assert all(set(turn) == {OWN, OTHER} for turn in trial.turns[1:])


def test_the_median_round_counts():
    class OneLuckyRound(GivenTimes):
        def time(self, configs):
            self.turns.append(tuple(configs))
            return [0.5 if config == OTHER and len(self.turns) == 2 else 1.0 for config in configs]

    finding = search(OneLuckyRound({}), Proposals((OWN, OTHER), OWN, None))
    assert (finding.choices[0].config, finding.choices[0].ms) == (OWN, 1.0)


def test_when_descriptors_win_the_best_tile_without_them_is_chosen_too():
    described = replace(OWN, descriptors=True)
    faster = replace(THIRD, descriptors=True)
    times = {OWN: 1.0, OTHER: 0.9, described: 0.8, faster: 0.7}
    best, plain = search(GivenTimes(times), Proposals(tuple(times), OWN, described)).choices
    assert (best.config, best.heuristic_ms, best.candidates) == (faster, 0.8, 4)
    assert (plain.config, plain.heuristic_ms, plain.candidates) == (OTHER, 1.0, 2)


def test_when_pointers_win_one_choice_serves_both():
    described = replace(OWN, descriptors=True)
    times = {OWN: 1.0, OTHER: 0.7, described: 0.8}
    (best,) = search(GivenTimes(times), Proposals(tuple(times), OWN, described)).choices
    assert (best.config, best.heuristic_ms) == (OTHER, 0.8)


def test_a_slow_way_of_loading_keeps_its_rivals_through_the_rounds():
    """Beside a tile with descriptors twice as fast, pointer tiles are hopeless only against one another."""
    described = replace(OWN, descriptors=True)
    times = {OWN: 1.0, OTHER: 0.9, THIRD: 1.6, described: 0.4}
    trial = GivenTimes(times)
    search(trial, Proposals(tuple(times), OWN, described))
    assert all(set(turn) == {OWN, OTHER, described} for turn in trial.turns[1:])
