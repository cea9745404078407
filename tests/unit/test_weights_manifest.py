"""Which tensors travel, where they lie in the buckets, and what a digest sees."""

from __future__ import annotations

import pytest
import torch

from tests.support.weight_ends import BUCKET_BYTES, CPU, Net, expected, same
from zbgrpo.errors import WeightSyncError
from zbgrpo.weights.manifest import TensorSpec, WeightManifest, digest
from zbgrpo.weights.staged import stage_manifests


def manifest_of(*specs: tuple[str, list[int], str]) -> WeightManifest:
    return WeightManifest([TensorSpec(*spec) for spec in specs], BUCKET_BYTES)


def test_manifests_that_differ_raise_an_error_that_names_the_tensor() -> None:
    mine = manifest_of(("a", [2, 3], "float32"), ("b", [4], "bfloat16"))
    (same_again,) = stage_manifests(mine.specs, [WeightManifest.decode(mine.encode())], BUCKET_BYTES)
    assert same_again.specs == mine.specs
    first, second = stage_manifests(mine.specs, [mine.specs[1:], mine.specs[:1]], BUCKET_BYTES)
    assert [s.name for s in first.specs] == ["b"] and [s.name for s in second.specs] == ["a"]
    for other, culprit in [
        (manifest_of(("a", [2, 3], "float32")), r"not sent \['b'\]"),
        (
            manifest_of(("a", [2, 3], "float32"), ("b", [4], "bfloat16"), ("c", [1], "float32")),
            r"not known here \['c'\]",
        ),
        (manifest_of(("a", [3, 2], "float32"), ("b", [4], "bfloat16")), "weight a: .*3, 2"),
        (manifest_of(("a", [2, 3], "float32"), ("b", [4], "float16")), "weight b: .*float16"),
    ]:
        with pytest.raises(WeightSyncError, match=culprit):
            stage_manifests(mine.specs, [other.specs], BUCKET_BYTES)
    with pytest.raises(WeightSyncError, match=r"by two stages \['a'\]"):
        stage_manifests(mine.specs, [mine.specs, mine.specs[:1]], BUCKET_BYTES)


def test_a_dtype_that_torch_does_not_know_is_refused() -> None:
    for name in ("float7", "nn", "zeros"):
        with pytest.raises(WeightSyncError, match=name):
            manifest_of(("a", [1], name))


def test_tied_weights_travel_once_and_temporary_buffers_never() -> None:
    names = [spec.name for spec in WeightManifest.of(Net(0), torch.bfloat16, BUCKET_BYTES).specs]
    assert names == ["embed.weight", "inner.weight", "inner.bias", "scale", "count"]
    untied = WeightManifest.of(Net(0, tied=False), torch.bfloat16, BUCKET_BYTES)
    assert {s.name for s in untied.specs} == {*names, "head.weight"}
    dtypes = {spec.name: spec.dtype for spec in untied.specs}
    assert dtypes.pop("count") == "int64" and set(dtypes.values()) == {"bfloat16"}


@pytest.mark.parametrize("bucket_bytes", [1, 64, 200, 1 << 20])
def test_tensors_have_places_of_their_own_in_the_buckets(bucket_bytes: int) -> None:
    manifest = WeightManifest.of(Net(0, tied=False), torch.float32, bucket_bytes)
    buckets = manifest.allocate(CPU)
    assert manifest.num_bytes == sum(len(bucket) for bucket in buckets)
    views = manifest.views(buckets)
    wanted = expected(3, torch.float32, tied=False)
    for name, view in views.items():
        view.copy_(wanted[name])
        assert view.data_ptr() % 8 == 0
    assert same(views, wanted), "one tensor has overwritten another"
    largest = max(-(-t.numel() * t.element_size() // 64) * 64 for t in wanted.values())
    assert all(len(bucket) <= max(bucket_bytes, largest) for bucket in buckets)
    assert (len(buckets) == 1) == (bucket_bytes == 1 << 20)


def test_a_digest_sees_every_byte_name_and_place() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {"a": torch.randn(50, generator=generator), "b": torch.arange(7, dtype=torch.uint8)}
    value = digest(tensors)
    assert digest({name: tensor.clone() for name, tensor in tensors.items()}) == value
    for name, tensor in tensors.items():
        data = tensor.view(torch.uint8)
        for byte in range(len(data)):
            for bit in (1, 128):
                data[byte] ^= bit
                assert digest(tensors) != value, (name, byte, bit)
                data[byte] ^= bit
    assert digest(dict(reversed(tensors.items()))) != value
    assert digest({"c": tensors["a"], "b": tensors["b"]}) != value
    assert digest(tensors) == value


def test_a_digest_sees_two_changes_that_mirror_each_other() -> None:
    """Signs flipped in pairs, neighbours exchanged, all of a tensor negated: a plain sum would let them cancel."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        tensor = torch.randn(300, generator=generator)
        value = digest({"a": tensor})
        i, j = torch.randperm(300, generator=generator)[:2].tolist()
        signs, exchanged = tensor.clone(), tensor.clone()
        signs[[i, j]] *= -1
        exchanged[[i, j]] = tensor[[j, i]]
        values = [digest({"a": changed}) for changed in (signs, exchanged, -tensor, tensor.flip(0))]
        assert value not in values
    large = torch.zeros((1 << 18) + 1)  # chunks apart
    large[5] = 1.0
    assert digest({"a": large}) != digest({"a": large.roll(1 << 18)})
