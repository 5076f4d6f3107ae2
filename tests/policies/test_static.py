"""Static pins what its profile counts most often, and says what is wrong with a profile."""

import json

import numpy as np
import pytest
import torch
from command import assert_one_line

from residency.conf import compose
from residency.policies.cache.static import Static
from residency.policies.errors import ConfigError
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.slots import SlotPool
from residency.testing import CachePolicyContract
from residency.testing.cache_contract import SPACE

COUNTS = [[5, 1, 9, 1], [7, 0, 8, 8]]
SMALL = IdSpace(num_layers=2, num_experts=4, top_k=2)


class TestStatic(CachePolicyContract):
    policy = Static

    @pytest.fixture(autouse=True)
    def profile(self, tmp_path):
        counts = np.arange(SPACE.num_ids).reshape(SPACE.num_layers, -1) % 7
        np.savez(tmp_path / "profile.npz", counts=counts)
        self.params = {"profile": str(tmp_path / "profile.npz")}


def made(file, content, **params):
    if file.suffix == ".json":
        file.write_text(json.dumps(content))
    else:
        np.savez_compressed(file, **content)
    return Static(Static.Config(profile=str(file), **params))


def pinned(policy, space=SMALL):
    policy.allocate(space, torch.device("cpu"))
    return policy.pinned.nonzero().flatten().tolist()


@pytest.mark.parametrize("form", ["plain.json", "named.json", "counts.npz"])
def test_every_form_of_counts(tmp_path, form):
    content = {
        "plain.json": COUNTS,
        "named.json": {"counts": COUNTS},
        "counts.npz": {"counts": np.array(COUNTS, dtype=np.int32)},
    }
    policy = made(tmp_path / form, content[form], slots=3)
    assert pinned(policy) == [2, 6, 7]
    assert policy.keys[:8].tolist() == [*COUNTS[0], *COUNTS[1]]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64])
def test_recorded_routes_are_counted(tmp_path, dtype):
    ids = np.random.default_rng(0).integers(0, 4, (50, 2, 3)).astype(dtype)
    expected = [np.bincount(ids[:, layer].ravel(), minlength=4).tolist() for layer in range(2)]
    policy = made(tmp_path / "trace.npz", {"expert_ids": ids, "num_experts": np.int64(4)})
    pinned(policy)
    assert policy.keys[:8].tolist() == [*expected[0], *expected[1]]


def test_a_layers_own_experts_where_each_has_its_share(tmp_path):
    policy = made(tmp_path / "p.json", COUNTS, slots=4, scope="per_layer")
    assert pinned(policy) == [0, 2, 6, 7]


def test_only_pinned_experts_enter_and_none_leaves(tmp_path):
    policy = made(tmp_path / "p.json", COUNTS, slots=3)
    pool = SlotPool(SMALL, 3, policy, torch.device("cpu"))
    evictions = 0
    for token in range(4):
        for layer in range(2):
            step = Step(torch.tensor(token), layer, Phase.DECODE)
            admission = pool.admit(torch.arange(4), step)
            evictions += int(admission.counts[3])
            pool.touch(admission.unique, step)
    assert sorted(pool.id_of.tolist()) == [2, 6, 7]
    assert evictions == 0


REFUSED = {
    "words.json": ("not counts", "neither counts nor routes"),
    "fractions.json": ([[0.5]], "whole numbers"),
    "flat.json": ([1, 2], "neither counts nor routes"),
    "ragged.json": ([[1, 2], [3]], "neither counts nor routes"),
    "negative.json": ([[1, -2]], "not a count for each expert"),
    "empty.json": ([], "not a count for each expert"),
    "other.npz": ({"weights": np.zeros(3)}, "neither counts nor routes"),
    "float.npz": ({"counts": np.zeros((3, 8))}, "neither counts nor routes"),
    "shape.json": ([[1, 2, 3]] * 3, "3 x 3 experts, and the model has 3 x 8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_profile_that_cannot_serve_is_refused(checkpoint, tmp_path, name):
    content, words = REFUSED[name]
    policy = made(tmp_path / name, content)
    base = ["model=folder", f"model.path={checkpoint}", "device=cpu", "cache=static"]
    (conflict,) = compose([*base, f"cache.profile={tmp_path / name}"]).conflicts()
    assert_one_line(str(conflict), f"{name}", words, "--routes")
    with pytest.raises(ConfigError):
        policy.allocate(IdSpace(3, 8, 2), torch.device("cpu"))


def test_a_file_that_is_damaged_or_missing(tmp_path):
    (tmp_path / "damaged.npz").write_bytes(b"PK not an archive")
    for name, words in (("damaged.npz", "neither counts nor routes"), ("gone.npz", "no such file")):
        (fault,) = Static(Static.Config(profile=str(tmp_path / name))).faults()
        assert_one_line(str(fault), name, words)
    (fault,) = Static(Static.Config()).faults()
    assert_one_line(str(fault), "cache=static", "given none", "cache.profile=FILE")
