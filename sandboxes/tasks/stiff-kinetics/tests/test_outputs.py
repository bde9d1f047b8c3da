"""Hidden networks against closed forms, and against runs at a tolerance of 1e-9 that two orders agree on."""

import json
import math

import pytest


def reaction(reactants, products, rate):
    return {"in": reactants, "out": products, "rate": rate}


@pytest.fixture
def solve(run, scratch):
    def solver(reactions, start, times):
        path = scratch / "network.json"
        path.write_text(json.dumps({"reactions": reactions, "start": start, "times": times}))
        done = run(["python3", "/app/kinetics.py", path], timeout=10)
        assert done.code == 0, done.err
        return json.loads(done.out)

    return solver


def close(found, wanted):
    assert len(found) == len(wanted)
    return all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-12) for a, b in zip(found, wanted, strict=True))


def test_a_chain_of_decays(solve):
    found = solve([reaction({"A": 1}, {"B": 1}, 3), reaction({"B": 1}, {"C": 1}, 0.25)], {"A": 2}, [0.5, 2, 20])
    for i, t in enumerate((0.5, 2, 20)):
        a, b = 2 * math.exp(-3 * t), 2 * 3 / (0.25 - 3) * (math.exp(-3 * t) - math.exp(-0.25 * t))
        assert close([found["A"][i], found["B"][i], found["C"][i]], [a, b, 2 - a - b])


def test_all_species_are_given_and_time_zero_is_the_start(solve):
    found = solve([reaction({"A": 1}, {"B": 1, "C": 2}, 1)], {"A": 0.5, "Ar": 0.25}, [0, 1])
    assert set(found) == {"A", "B", "C", "Ar"}
    assert close([found[name][0] for name in ("A", "B", "C", "Ar")], [0.5, 0, 0, 0.25])
    assert close(found["C"][1:], [1 - math.exp(-1)]) and close(found["Ar"], [0.25, 0.25])


def test_two_of_a_kind_react_in_second_order_and_vanish_in_pairs(solve):
    found = solve([reaction({"A": 2}, {"D": 1}, 0.7)], {"A": 3}, [0.1, 1, 50])
    left = [3 / (1 + 2 * 0.7 * 3 * t) for t in (0.1, 1, 50)]
    assert close(found["A"], left) and close(found["D"], [(3 - a) / 2 for a in left])


def test_two_reactants_of_unequal_amount(solve):
    found = solve([reaction({"A": 1, "B": 1}, {"C": 1}, 2)], {"A": 1, "B": 0.4}, [0.5, 3])
    wanted = []
    for t in (0.5, 3):
        e = math.exp(2 * 0.6 * t)
        wanted.append(0.4 * (e - 1) / (e - 0.4))
    assert close(found["C"], wanted) and close(found["A"], [1 - c for c in wanted])


def test_autocatalysis(solve):
    found = solve([reaction({"A": 1, "B": 1}, {"B": 2}, 5)], {"A": 0.999, "B": 0.001}, [0.5, 1.5, 4])
    assert close(found["B"], [1 / (1 + 999 * math.exp(-5 * t)) for t in (0.5, 1.5, 4)])


def test_a_catalyst_is_not_used_up(solve):
    found = solve([reaction({"S": 1, "E": 1}, {"P": 1, "E": 1}, 40)], {"S": 1, "E": 0.05}, [0.2, 1])
    assert close(found["E"], [0.05, 0.05]) and close(found["S"], [math.exp(-0.4), math.exp(-2)])


def test_a_reaction_without_reactants_is_a_constant_source(solve):
    found = solve([reaction({}, {"A": 1}, 2), reaction({"A": 1}, {}, 4)], {}, [0.1, 5])
    assert close(found["A"], [0.5 * (1 - math.exp(-0.4)), 0.5 * (1 - math.exp(-20))])


def test_oscillations_keep_their_phase(solve):
    prey = [reaction({"X": 1}, {"X": 2}, 1.1), reaction({"X": 1, "Y": 1}, {"Y": 2}, 0.4)]
    found = solve([*prey, reaction({"Y": 1}, {}, 0.7)], {"X": 2, "Y": 1}, [5, 15, 30])
    assert close(found["X"], [0.466436282, 1.396024085, 0.988947616])
    assert close(found["Y"], [2.448461145, 1.014554675, 1.140762897])


def test_a_fast_equilibrium_with_a_slow_drain(solve):
    pair = [reaction({"A": 1}, {"B": 1}, 2e6), reaction({"B": 1}, {"A": 1}, 6e6), reaction({"B": 1}, {"C": 1}, 1)]
    found = solve(pair, {"A": 1}, [1e-7, 1e-3, 1, 10])
    assert close(found["A"], [0.862332239668, 0.74981257032, 0.58410063791, 0.06156376740])
    assert close(found["C"], [7.7915298894e-9, 2.49937486989e-4, 0.22119917437, 0.91791497971])


def test_robertson_beyond_the_visible_times(solve):
    network = [
        reaction({"A": 1}, {"B": 1}, 0.04), reaction({"B": 2}, {"B": 1, "C": 1}, 3e7),
        reaction({"B": 1, "C": 1}, {"A": 1, "C": 1}, 1e4),
    ]  # fmt: skip
    found = solve(network, {"A": 1}, [0.01, 100, 1e7])
    assert close(found["A"], [0.999600682688, 0.617234882395, 2.07609344e-4])
    assert close(found["B"], [3.6450478878e-5, 6.1535912747e-6, 8.3060775e-10])


def test_the_oregonator_through_several_spikes(solve):
    network = [
        reaction({"Y": 1}, {"X": 1}, 0.0804), reaction({"X": 1, "Y": 1}, {}, 1.6e9),
        reaction({"X": 1}, {"X": 2, "Z": 1}, 480), reaction({"X": 2}, {}, 4e7), reaction({"Z": 1}, {"Y": 1}, 1),
    ]  # fmt: skip
    found = solve(network, {"X": 1e-8, "Y": 3e-7, "Z": 2.4e-6}, [20, 100, 150, 300])
    assert close(found["Y"], [3.88687316e-5, 5.295890608e-4, 4.963951362e-4, 2.896470088e-4])
    assert close(found["Z"], [2.4283968e-8, 9.97846707e-5, 2.864296046e-5, 6.99805957e-7])


def test_the_saved_output_of_the_visible_network(read):
    found = json.loads(read("/app/robertson.json"))
    assert close(found["A"], [1, 0.98517211386, 0.90551867852, 0.71582706859, 0.18320225770, 0.00493827458])
    assert close(found["B"][1:], [3.38639538e-5, 2.24047569e-5, 9.18553476e-6, 8.94237125e-7, 1.98499411e-8])
