"""Store, shards and checkpoint: damaged, hostile and changing files are named, never served."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import coop
from coop.adapters import attach
from coop.checkpoint import open_checkpoint
from coop.errors import CheckpointError, ClosedError, CoopError, LayoutError, StoreError
from coop.ids import ExpertId
from coop.layout import resolve_layout
from coop.shards import read_checkpoint_tensors, read_header
from coop.store import DirectFile, ExpertStore
from tests.families import build_family


def write_safetensors(path: Path, header: dict[str, Any] | bytes, body: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "body", "what"),
    [
        ({"a": entry(0, 8, [2])}, b"1234567", "header declares"),
        ({"a": entry(0, 8, [2])}, b"123456789", "header declares"),
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"x" * 12, "begins at byte"),
        ({"a": entry(0, 8, [3])}, b"x" * 8, "is not 8 bytes"),
        ({"a": entry(0, -8, [2])}, b"x" * 8, "not sizes"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, b"x" * 4, "not sizes"),
        ({"a": entry(0, 4, [1], "Q9")}, b"x" * 4, "is not known"),
        ({"a": [1]}, b"", "lacks dtype"),
        ([1], b"", "is not a table"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":1}', b"x" * 4, "appears twice"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b"\xff\xfe", b"", "not valid JSON"),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(
    header: Any, body: bytes, what: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    raw = json.dumps(header).encode() if isinstance(header, list) else header
    write_safetensors(path, raw, body)
    with pytest.raises(StoreError, match=what):
        read_header(path)


@pytest.mark.parametrize("keep", [0, 5])
def test_a_file_too_short_for_a_header_is_refused(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * keep)
    with pytest.raises(StoreError, match="too short"):
        read_header(path)


def test_a_header_length_beyond_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(StoreError, match="header says"):
        read_header(path)


@pytest.mark.parametrize("cut", [1, 3000])
def test_a_truncated_shard_is_named_before_anything_is_loaded(cut: int, tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    shard = tmp_path / "model.safetensors"
    os.truncate(shard, shard.stat().st_size - cut)
    with pytest.raises(StoreError, match=r"model.safetensors.*header declares \d+ bytes, the file has \d+"):
        coop.attach(tmp_path)


def test_a_folder_with_both_a_single_file_and_an_index_reads_what_transformers_reads(tmp_path: Path) -> None:
    reference = build_family(tmp_path / "a", "mixtral")
    build_family(tmp_path / "b", "mixtral", vocab_size=97)
    os.link(tmp_path / "b" / "model.safetensors", tmp_path / "a" / "other.safetensors")
    names = read_header(tmp_path / "b" / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "other.safetensors")}
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
    ids = torch.arange(3, 23)[None]
    with coop.attach(tmp_path / "a", budget="50%") as runtime, torch.no_grad():
        got = runtime.model(input_ids=ids).logits
    assert torch.allclose(got, reference(input_ids=ids).logits, atol=1e-4)


def test_a_live_model_is_not_served_from_another_models_checkpoint(tmp_path: Path) -> None:
    model = build_family(tmp_path / "a", "mixtral")
    build_family(tmp_path / "b", "mixtral", num_local_experts=16, intermediate_size=48)
    with pytest.raises(CheckpointError, match=r"the model has 8 experts .top-2., the checkpoint 16"):
        coop.attach(model, tmp_path / "b")
    assert model(input_ids=torch.arange(3, 9)[None]).logits.isfinite().all()


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        write_safetensors(tmp_path / name, {"x": entry(0, 4, [1])}, b"1234")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StoreError, match=r"is also in a.safetensors"):
        read_checkpoint_tensors(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "sub/x", "x\0y", "x" * 5000, "..", "", "link"])
def test_an_index_cannot_lead_outside_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(tmp_path / "outside", {"x": entry(0, 4, [1])}, b"1234")
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(CheckpointError):
        read_checkpoint_tensors(folder)


def test_a_fifo_for_a_shard_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_checkpoint_tensors(tmp_path)


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="safetensors only"):
        read_checkpoint_tensors(tmp_path)


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"auto_map": {"AutoModel": "x.Y"}}, "runs none"),
        ({"_attn_implementation_internal": "evil/kernel"}, "private key"),
        ({"attn_implementation": "evil/kernel"}, "attn_implementation is 'evil/kernel'"),
        ({"experts_implementation": "evil/kernel"}, "experts_implementation is"),
        ({"text_config": {"auto_map": {"AutoConfig": "x.Y"}}}, "runs none"),
        ({"num_experts_per_tok": "2"}, "'2' experts per token"),
        ({"num_experts_per_tok": 2.5}, "2.5 experts per token"),
        ({"hidden_size": "x"}, "hidden_size|does not describe"),
        ({"vocab_size": 10}, "no weights that fit"),
        ({"hidden_act": "nope"}, "nope|does not describe"),
        ({"num_attention_heads": 0}, "num_attention_heads|does not describe|no weights"),
        ({"dtype": "foo"}, "foo"),
        ({"rope_scaling": 5}, "config.json|does not describe"),
        ({"quantization_config": "x"}, "quantised .x."),
        ({"num_local_experts": 10**9}, "num_local_experts is 1000000000"),
        ({"num_experts_per_tok": 9}, "9 experts per token of 8"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantised .mxfp4."),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"num_local_experts": 9}, "expert tensors are missing"),
        ({"intermediate_size": 32}, "the model expects"),
    ],
)
def test_a_config_that_is_hostile_or_not_of_these_weights_is_refused(
    changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    build_family(tmp_path, "mixtral")
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=what):
        coop.attach(tmp_path, budget="100%")


def test_a_dense_model_is_refused_by_its_class(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **small)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="LlamaForCausalLM has no mixture-of-experts layer"):
        coop.attach(tmp_path)


@pytest.mark.parametrize("part", ["model.norm.weight", "q_proj", "lm_head", "gate.weight"])
def test_dense_weights_that_are_missing_are_refused_not_made_up(part: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build_family(tmp_path, "mixtral")
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(n for n in tensors if part in n)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="no weights that fit for"):
        coop.attach(tmp_path)


def test_a_dense_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build_family(tmp_path, "mixtral")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="norm"):
        coop.attach(tmp_path)


def test_experts_in_an_unreadable_dtype_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build_family(tmp_path, "mixtral")
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(n for n in tensors if "experts" in n)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LayoutError, match="F8_E4M3"):
        coop.attach(tmp_path)


def test_a_path_that_is_no_folder_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"give a folder that holds config.json"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        open_checkpoint(tmp_path / "file")


def test_a_base_for_a_full_model_is_refused_not_ignored(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with pytest.raises(CheckpointError, match="not an adapter"):
        coop.attach(tmp_path, base=tmp_path)


def test_direct_reads_equal_the_file_at_any_offset(tmp_path: Path) -> None:
    data = os.urandom(50_000)
    (tmp_path / "f").write_bytes(data)
    file = DirectFile(tmp_path / "f")
    for offset, nbytes in ((0, 1), (1, 4096), (4095, 2), (4096, 8192), (49_000, 1000), (0, 50_000)):
        assert bytes(file.read(offset, nbytes, "x")) == data[offset : offset + nbytes]
    with pytest.raises(StoreError, match=r"ends at byte 50000, 50001 needed"):
        file.read(49_000, 1001, "x")
    file.close()


def test_short_reads_are_continued_and_a_transient_error_is_retried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(20_000)
    (tmp_path / "f").write_bytes(data)
    file = DirectFile(tmp_path / "f")
    real, calls = os.preadv, []

    def flaky(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        return real(fd, [buffers[0][:4096]], offset)

    monkeypatch.setattr(os, "preadv", flaky)
    assert bytes(file.read(100, 19_000, "x")) == data[100:19_100]
    assert len(calls) > 5
    file.close()


def test_a_system_without_direct_reads_and_preadv_reads_the_same_past_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncached: list[tuple[int, int]] = []
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    monkeypatch.delattr(os, "preadv", raising=False)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    monkeypatch.setattr(fcntl, "F_NOCACHE", 48, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda _, command, value: uncached.append((command, value)))
    data = os.urandom(50_000)
    (tmp_path / "f").write_bytes(data)
    file = DirectFile(tmp_path / "f")
    assert uncached == [(48, 1)] and not file.is_direct
    for offset, nbytes in ((0, 1), (4095, 2), (49_000, 1000), (0, 50_000)):
        assert bytes(file.read(offset, nbytes, "x")) == data[offset : offset + nbytes]
    with pytest.raises(StoreError, match=r"ends at byte 50000, 50001 needed"):
        file.read(49_000, 1001, "x")
    file.close()


def test_a_model_run_in_inference_mode_is_served(tmp_path: Path) -> None:
    reference = build_family(tmp_path, "mixtral")
    ids = torch.arange(3, 23)[None]
    with coop.attach(tmp_path, budget="20%") as runtime, torch.inference_mode():
        assert torch.allclose(runtime.model(ids).logits, reference(ids).logits, atol=1e-4)


def test_a_slot_made_in_inference_mode_over_anyones_memory_can_be_filled_later(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    config = AutoConfig.from_pretrained(tmp_path)
    store = ExpertStore(resolve_layout(config, read_checkpoint_tensors(tmp_path), torch.float32))
    memory, own = torch.empty(store.geometry[0].slot_bytes, dtype=torch.uint8), store.new_slot(0)
    with torch.inference_mode():
        slot = store.slot_over(0, memory)
    for target in (slot, own):
        store.load(ExpertId(0, 1), target)
    assert slot.buffer is memory and torch.equal(slot.weights["down_proj"], own.weights["down_proj"])
    store.close()


def test_a_persistent_read_error_names_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"x" * 5000)
    file = DirectFile(tmp_path / "f")

    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StoreError, match=r"f: w1: cannot be read: Input/output error"):
        file.read(0, 10, "w1")
    file.close()


def test_a_shard_rewritten_in_place_while_running_is_refused_and_leaks_no_lease(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    ids = torch.arange(3, 23)[None]
    with coop.attach(tmp_path, budget="20%", prefetch=False) as runtime:
        runtime.model(input_ids=ids)
        shard = tmp_path / "model.safetensors"
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        with shard.open("r+b") as file:
            file.write(content)
        os.utime(shard, ns=(1, 1))
        with pytest.raises(StoreError, match="changed since start"):
            runtime.model(input_ids=ids)
        runtime.scheduler.wait_idle(5)
        assert runtime.scheduler.residency.leased() == 0


def test_a_shard_replaced_by_rename_keeps_serving_the_old_bytes(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    ids = torch.arange(3, 23)[None]
    with coop.attach(tmp_path, budget="20%") as runtime, torch.no_grad():
        before = runtime.model(input_ids=ids).logits
        (tmp_path / "new").write_bytes(b"junk")
        os.replace(tmp_path / "new", tmp_path / "model.safetensors")
        assert torch.equal(before, runtime.model(input_ids=ids).logits)


def test_a_profile_flag_or_strategy_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with pytest.raises(CoopError, match="did you mean SpeedFirst"):
        coop.attach(tmp_path, strategy="speedfirst")
    with pytest.raises(CoopError, match="dtype 'int4' is none of"):
        coop.attach(tmp_path, dtype="int4")


def test_a_file_that_is_written_to_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(50_000))
    file, real = DirectFile(path), os.preadv

    def torn(*args: Any) -> int:
        count = real(*args)
        with path.open("r+b") as other:
            other.write(b"x" * 10)
            os.utime(path, ns=(1, 1))
        return count

    monkeypatch.setattr(os, "preadv", torn)
    with pytest.raises(StoreError, match="changed since start"):
        file.read(0, 100, "x")
    file.close()
    with pytest.raises(ClosedError):
        file.read(0, 100, "x")


def test_a_shard_replaced_while_the_model_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_family(tmp_path, "mixtral")
    load = attach.load_dense

    def replaced(*args: Any) -> Any:
        shutil.copy(tmp_path / "model.safetensors", tmp_path / "new")
        os.replace(tmp_path / "new", tmp_path / "model.safetensors")
        return load(*args)

    monkeypatch.setattr(attach, "load_dense", replaced)
    with pytest.raises(StoreError, match="changed while it was being opened"):
        coop.attach(tmp_path, budget="50%")


def test_dense_weights_outlive_a_shard_that_shrinks(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="100%") as runtime:
        os.truncate(tmp_path / "model.safetensors", 100)
        assert all(parameter.isfinite().all() for parameter in runtime.model.parameters())
        with pytest.raises(StoreError, match="changed since start"):
            runtime.model(input_ids=torch.arange(3, 40)[None])
