"""Packs: what lies where, what is refused by name, and a run that was cut short goes on to the same bytes.

Owns hostile and damaged packs; promises that each is refused with one sentence, and none is served.
"""

from __future__ import annotations

import errno
import filecmp
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import coop
from coop import pack as command
from coop.adapters.attach import load_config, open_store
from coop.adapters.transformers import load_without_experts, model_identity
from coop.checkpoint import open_checkpoint
from coop.devices.cpu import CpuDevice
from coop.errors import CheckpointError, CoopError, RequestError, StoreError
from coop.ids import ExpertId
from coop.packs import measure as pack_measure
from coop.packs import writer
from coop.packs.format import lay_out, pack_layout, read_manifest
from coop.packs.journal import JOURNAL_NAME
from coop.packs.verify import find_damage
from coop.tiers import HostTier
from tests.families import build_family
from tests.packs import edit_json, pack, read_table, replace_table
from tests.unit.profiles import build_profile

EXPERTS = "experts-00001-of-00001.safetensors"


def with_profile(folder: Path, hottest: int) -> None:
    """A profile that belongs to the model in `folder`, whose answers use one expert most."""
    config = load_config(folder)
    model = load_without_experts(folder, config, torch.bfloat16)
    profile = build_profile()
    counts = profile.hot_answer.copy()
    for layer in counts:
        top = int(layer.argmax())
        layer[hottest], layer[top] = layer[top], layer[hottest]
    replace(profile, identity=model_identity(model), hot_answer=counts).save(folder)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    build_family(tmp_path / "plain", "mixtral", torch.bfloat16)
    return tmp_path / "plain"


@pytest.fixture
def packed(plain: Path, tmp_path: Path) -> Path:
    pack(plain, tmp_path / "pack", "int4")
    return tmp_path / "pack"


def open_pack(folder: Path) -> None:
    coop.attach(folder, budget="100%").close()


def damage_of(folder: Path) -> list[str]:
    return find_damage(folder, lambda nbytes: None).names


# where bytes lie


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_every_extent_begins_on_a_page_and_any_reader_opens_the_file(
    family: str, kind: str, tmp_path: Path
) -> None:
    build_family(tmp_path / "plain", family, torch.bfloat16)
    pack(tmp_path / "plain", tmp_path / "pack", kind)
    layout = pack_layout(load_config(tmp_path / "pack"), tmp_path / "pack", torch.bfloat16)
    size = (tmp_path / "pack" / EXPERTS).stat().st_size
    ends = sorted((e.offset, e.offset + e.nbytes) for layer in layout.layers for e in layer.extents)
    assert all(start % 4096 == 0 for start, _ in ends)
    assert [end for _, end in ends] == [*(start for start, _ in ends[1:]), size]
    with safe_open(tmp_path / "pack" / EXPERTS, framework="pt") as file:
        names = [name for name in file.keys() if not name.startswith("pad.")]  # noqa: SIM118
        pads = [file.get_tensor(name) for name in file.keys() if name.startswith("pad.")]  # noqa: SIM118
    per_expert = len(layout.layers[0].fields)
    assert len(names) == per_expert * sum(len(layer.extents) for layer in layout.layers)
    assert all(not pad.any() for pad in pads)


def test_tensors_have_the_model_s_names_and_shapes(plain: Path, tmp_path: Path) -> None:
    pack(plain, tmp_path / "pack")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain)
    tensors = load_file(tmp_path / "pack" / EXPERTS)
    for layer, block in enumerate(model.model.layers):
        for name, stack in block.mlp.experts.named_parameters(recurse=False):
            for expert in range(8):
                assert torch.equal(tensors[f"layers.{layer}.experts.{expert}.{name}"], stack[expert])


def test_files_end_before_they_are_too_large(
    monkeypatch: pytest.MonkeyPatch, plain: Path, tmp_path: Path
) -> None:
    pack(plain, tmp_path / "one")
    monkeypatch.setattr("coop.packs.format.FILE_BYTES", 40_000)
    manifest = pack(plain, tmp_path / "many")
    assert manifest.expert_files > 2
    paths = sorted((tmp_path / "many").glob("experts-*"))
    assert len(paths) == manifest.expert_files
    assert all(path.stat().st_size - 40_000 <= 40_000 for path in paths)
    assert manifest.layers == read_manifest(tmp_path / "one").layers  # the same extents
    assert damage_of(tmp_path / "many") == []
    open_pack(tmp_path / "many")


def test_an_expert_larger_than_a_file_has_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coop.packs.format.FILE_BYTES", 4096)
    places, files = lay_out([((), 8192), ((), 4096)], [[0, 1], [1, 0]])
    assert [(p.layer, p.expert, p.file) for p in places] == [(0, 0, 0), (0, 1, 1), (1, 1, 2), (1, 0, 3)]
    assert [file.nbytes - len(file.header) for file in files] == [8192, 8192, 4096, 4096]


def test_tokenizer_and_configs_are_copied_and_a_link_out_is_refused(plain: Path, tmp_path: Path) -> None:
    (plain / "tokenizer.json").write_text("{}")
    pack(plain, tmp_path / "pack")
    assert (tmp_path / "pack" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "pack" / "config.json").read_text())["dtype"] == "bfloat16"
    (tmp_path / "secret").write_text("s")
    (plain / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"vocab\.txt leads outside"):
        pack(plain, tmp_path / "other")


def test_a_tier_of_pinned_memory_is_filled_straight_too(packed: Path) -> None:
    config = load_config(packed)
    store = open_store(open_checkpoint(packed), config, torch.bfloat16)
    budget = 4 * store.geometry[0].slot_bytes
    likelihood = np.zeros((len(store.geometry), 8))
    tier = HostTier(store, CpuDevice(), budget_bytes=budget, loader_threads=1, likelihood=likelihood)
    assert tier.window_bytes == 0
    for expert in (ExpertId(0, 3), ExpertId(2, 7), ExpertId(0, 3)):
        there, direct = tier.new_slot(expert.layer), store.new_slot(expert.layer)
        tier.load(expert, there)
        store.load(expert, direct)
        assert torch.equal(there.buffer, direct.buffer)
    assert (tier.counters.host_misses, tier.counters.host_hits) == (2, 1)
    tier.close()


def test_experts_of_a_quantised_pack_can_be_timed(packed: Path) -> None:
    with coop.attach(packed, budget="100%") as runtime:
        report = runtime.scheduler.warmup(row_counts=(1, 4), repeats=1, max_seconds=600)
    assert report.experts_done == 24 and np.isfinite(report.compute_ms).all()


# damage


@pytest.mark.parametrize("at_end", [True, False])
def test_a_flipped_byte_is_named_by_its_expert(packed: Path, at_end: bool, capsys: Any) -> None:
    layout = pack_layout(load_config(packed), packed, torch.bfloat16)
    extent = layout.layers[1].extents[6]
    with (packed / EXPERTS).open("r+b") as file:
        file.seek(extent.offset + (extent.nbytes - 1 if at_end else 5))  # the last one is padding
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert damage_of(packed) == ["layer 1 expert 6"]
    assert command.main(["--ckpt", str(packed), "--verify"]) == 1
    said = capsys.readouterr().out
    assert "  1 expert of 24 is damaged: layer 1 expert 6\n  pack it again" in said
    assert "beside" not in said


def test_a_flipped_byte_of_the_dense_weights_is_named_by_the_file(packed: Path, capsys: Any) -> None:
    path = packed / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert damage_of(packed) == ["model.safetensors"]
    assert command.main(["--ckpt", str(packed), "--verify"]) == 1
    said = capsys.readouterr().out
    assert "  1 file beside the experts is damaged: model.safetensors\n  pack it again" in said
    assert "24" not in said
    edit_json(packed / "coop_pack.json", dense_sha256={})
    assert damage_of(packed) == ["model.safetensors"]  # a digest that was left out


def _truncate(pack_folder: Path) -> None:
    size = (pack_folder / EXPERTS).stat().st_size
    os.truncate(pack_folder / EXPERTS, size - 4096)


def _drop_expert(pack_folder: Path) -> None:
    table = read_table(pack_folder / EXPERTS)
    entry = table.pop("layers.2.experts.3.down_proj")
    table["pad.9999"] = {
        **entry,
        "dtype": "U8",
        "shape": [entry["data_offsets"][1] - entry["data_offsets"][0]],
    }
    replace_table(pack_folder / EXPERTS, table)


def _reshape(pack_folder: Path) -> None:
    table = read_table(pack_folder / EXPERTS)
    entry = table["layers.0.experts.0.gate_up_proj"]
    entry["shape"] = [entry["shape"][0] * 2, entry["shape"][1] // 2]
    replace_table(pack_folder / EXPERTS, table)


def _add_stranger(pack_folder: Path) -> None:
    table = read_table(pack_folder / EXPERTS)
    name = next(name for name in table if name.startswith("pad."))
    table["layers.9.x"] = table.pop(name)
    replace_table(pack_folder / EXPERTS, table)


def _shift(pack_folder: Path) -> None:
    """Everything in place, but the data section begins 8 bytes off a page."""
    path = pack_folder / EXPERTS
    data = path.read_bytes()
    room = int.from_bytes(data[:8], "little")
    path.write_bytes((room + 8).to_bytes(8, "little") + data[8 : 8 + room] + b" " * 8 + data[8 + room :])


def _swap_tensors(pack_folder: Path) -> None:
    table = read_table(pack_folder / EXPERTS)
    left, right = "layers.0.experts.0.down_proj", "layers.0.experts.1.down_proj"
    table[left], table[right] = table[right], table[left]
    replace_table(pack_folder / EXPERTS, table)


def _link_out(pack_folder: Path) -> None:
    (pack_folder / EXPERTS).rename(pack_folder.parent / "elsewhere")
    (pack_folder / EXPERTS).symlink_to(pack_folder.parent / "elsewhere")


def _edit(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "coop_pack.json", **changes)


def _edit_layer(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        layers = json.loads((folder / "coop_pack.json").read_text())["layers"]
        edit_json(folder / "coop_pack.json", layers=[layers[0] | changes, *layers[1:]])

    return edit


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (_truncate, "header declares"),
    "an expert missing": (_drop_expert, r"has no layers\.2\.experts\.3\.down_proj"),
    "another shape": (_reshape, r"layers\.0\.experts\.0\.gate_up_proj: is U8 \(96, 8\), the model needs U8"),
    "a tensor too many": (_add_stranger, r"layers\.9\.x: is no tensor of the model"),
    "not on a page": (_shift, "not on a page of 4096"),
    "fields of two experts": (_swap_tensors, "its slot at"),
    "a link out of the folder": (_link_out, "leads outside"),
    "another version": (_edit(version=2), "version 2; this coop reads version 1"),
    "an unknown key": (_edit(surprise=1), "surprise: Extra inputs"),
    "an unknown dtype": (_edit(dtype="int2"), "dtype: Input should be"),
    "codes of another width": (_edit(dtype="int8"), "the model needs I8"),
    "a number as text": (_edit(expert_files="1"), "expert_files: Input should be a valid integer"),
    "a file that is not there": (_edit(expert_files=2), "experts-00001-of-00002"),
    "layers cut": (_edit(layers=[]), "layers: "),
    "a layer by another name": (_edit_layer(name="x"), "x has 8 experts, top-2; config.json says"),
    "fewer digests": (_edit_layer(sha256=[]), "8 experts and 0 digests"),
    "another top-k": (_edit_layer(top_k=3), "top-3; config.json says"),
    "a digest that is none": (_edit_layer(sha256=["x"] * 8), "String should match"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_damaged_or_hostile_pack_is_refused_with_one_sentence(packed: Path, what: str) -> None:
    damage, message = HOSTILE[what]
    damage(packed)
    with pytest.raises(CoopError, match=message) as refused:
        open_pack(packed)
    assert "\n" not in str(refused.value)
    assert "pad." not in str(refused.value)
    assert command.main(["--ckpt", str(packed), "--verify"]) == (1 if what == "truncated" else 2)


def test_a_truncated_file_of_experts_is_named_when_verified(packed: Path, capsys: Any) -> None:
    _truncate(packed)
    assert command.main(["--ckpt", str(packed), "--verify"]) == 1
    assert f"  1 file of experts is damaged: {EXPERTS}\n" in capsys.readouterr().out


def test_another_config_is_refused_and_a_pack_from_before_its_digest_opens(packed: Path, capsys: Any) -> None:
    edit_json(packed / "config.json", rms_norm_eps=0.5)
    with pytest.raises(CheckpointError, match=r"config\.json is not the one that was packed"):
        open_pack(packed)
    assert command.main(["--ckpt", str(packed), "--verify"]) == 1
    assert "beside the experts is damaged: config.json" in capsys.readouterr().out
    facts = json.loads((packed / "coop_pack.json").read_text())
    del facts["config_sha256"]
    (packed / "coop_pack.json").write_text(json.dumps(facts))
    open_pack(packed)
    assert damage_of(packed) == []


def test_a_pack_that_lost_a_file_says_what_it_is(packed: Path) -> None:
    (packed / EXPERTS).rename(packed / "kept")
    with pytest.raises(CheckpointError, match=rf"pack: {EXPERTS}: No such file .*: copy the pack again"):
        open_pack(packed)
    (packed / "kept").rename(packed / EXPERTS)
    (packed / "coop_pack.json").unlink()
    with pytest.raises(CheckpointError, match=r"looks like a pack without its coop_pack\.json"):
        open_pack(packed)


def test_a_manifest_of_the_wrong_model_is_refused(packed: Path) -> None:
    config = json.loads((packed / "config.json").read_text())
    edit_json(packed / "config.json", num_hidden_layers=config["num_hidden_layers"] - 1)
    edit_json(packed / "coop_pack.json", config_sha256="")
    with pytest.raises(CheckpointError, match=r"has 3 MoE layers, config\.json 2"):
        open_pack(packed)


def test_a_pack_takes_no_base_and_is_none(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a pack, whose adapter is merged, so --base"):
        open_checkpoint(packed, tmp_path / "plain")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "../pack"}')
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a pack: give the checkpoint that it was made from"):
        open_checkpoint(adapter)


def test_a_weight_that_is_not_finite_is_not_quantised(tmp_path: Path) -> None:
    model = build_family(tmp_path / "plain", "mixtral", torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[4, 0, 0] = torch.inf
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(StoreError, match="expert 4 has a down_proj that is not finite"):
        pack(tmp_path / "plain", tmp_path / "pack", "int8")


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_huge_weight_is_packed_or_its_expert_named(kind: str, tmp_path: Path) -> None:
    model = build_family(tmp_path / "plain", "mixtral", torch.bfloat16)
    weight = model.model.layers[1].mlp.experts.down_proj
    with torch.no_grad():
        weight[4, 0, 0] = 3e38
    model.save_pretrained(tmp_path / "plain")
    assert pack(tmp_path / "plain", tmp_path / "pack", kind).measured.relative_rms < 0.05
    with torch.no_grad():
        other = model.model.layers[2].mlp.experts.down_proj[5]
        other.copy_((torch.rand(other.shape, generator=torch.Generator().manual_seed(3)) - 0.5) * 2 * 3.3e38)
        other[:, 0] = torch.finfo(torch.bfloat16).max
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(
        StoreError, match=r"expert 5 has a down_proj that reaches 3\.39e\+38, .*: pack it as bf16"
    ):
        pack(tmp_path / "plain", tmp_path / "other", kind)


def test_a_source_that_is_replaced_while_it_is_opened_is_not_mixed(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = writer.load_dense

    def replaced(*arguments: Any) -> Any:
        data = (plain / "model.safetensors").read_bytes()
        (plain / "new").write_bytes(data)
        (plain / "new").rename(plain / "model.safetensors")
        return load(*arguments)

    monkeypatch.setattr(writer, "load_dense", replaced)
    with pytest.raises(StoreError, match="changed while it was being opened"):
        pack(plain, tmp_path / "pack")


# going on


class Killed(BaseException):
    """Stands in for the end of the process."""


def killed_after(count: int) -> Callable[[int], None]:
    left = [count]

    def advance(nbytes: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    return advance


def assert_same_folders(left: Path, right: Path) -> None:
    names = sorted(path.name for path in left.iterdir())
    assert names == sorted(path.name for path in right.iterdir())
    _, different, wrong = filecmp.cmpfiles(left, right, names, shallow=False)
    assert (different, wrong) == ([], [])


@pytest.mark.parametrize("kind", ["bf16", "int4"])
def test_a_killed_run_goes_on_to_the_same_bytes(
    kind: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(plain, tmp_path / "whole", kind)
    monkeypatch.setattr(writer, "SYNC_BYTES", 3 * 4096)
    with pytest.raises(Killed):
        pack(plain, tmp_path / "pack", kind, killed_after(10))
    hidden = tmp_path / ".pack.packing"
    assert not (tmp_path / "pack").exists() and hidden.is_dir()
    with (hidden / JOURNAL_NAME).open("ab") as file:
        file.write(b'{"expert": [1, ')  # cut short by the end of the process
    with pytest.raises(Killed):
        pack(plain, tmp_path / "pack", kind, killed_after(20))
    kept = [json.loads(line) for line in (hidden / JOURNAL_NAME).read_bytes().splitlines()]
    assert len([entry for entry in kept if "expert" in entry]) >= 17  # nothing after the cut was lost
    seen: list[int] = []
    pack(plain, tmp_path / "pack", kind, seen.append)
    assert sum(seen) == sum(seen[:1]) * 24  # every expert is counted once, there already or not
    assert_same_folders(tmp_path / "whole", tmp_path / "pack")
    assert not hidden.exists()


def test_what_was_damaged_in_between_is_written_again(plain: Path, tmp_path: Path) -> None:
    pack(plain, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        pack(plain, tmp_path / "pack", advance=interrupted_after(10))
    layout = pack_layout(load_config(tmp_path / "whole"), tmp_path / "whole", torch.bfloat16)
    with (tmp_path / ".pack.packing" / EXPERTS).open("r+b") as file:
        file.seek(layout.layers[0].extents[2].offset)
        file.write(b"damage")
    with writer.Packer.open(writer.PackRequest(ckpt=plain, out=tmp_path / "pack")) as packer:
        with packer.journal() as journal:
            packer.write(journal, packer.target(), lambda nbytes: None)
            journal.publish()
        assert packer.num_resumed == 9 + 1  # the eleventh was written, the third was not as it was
    assert_same_folders(tmp_path / "whole", tmp_path / "pack")


def interrupted_after(count: int) -> Callable[[int], None]:
    advance = killed_after(count)

    def interrupt(nbytes: int) -> None:
        try:
            advance(nbytes)
        except Killed:
            raise KeyboardInterrupt from None

    return interrupt


def test_other_options_or_another_source_do_not_go_on(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        pack(plain, tmp_path / "pack", "int8", killed_after(10))
    with pytest.raises(
        RequestError, match=r"begun with other options .*\(dtype: int8, now int4\).*--overwrite"
    ):
        pack(plain, tmp_path / "pack", "int4")
    os.utime(plain / "model.safetensors")
    with pytest.raises(RequestError, match=r"another source \(source\)"):
        pack(plain, tmp_path / "pack", "int8")
    pack(plain, tmp_path / "pack", "int4", is_overwriting=True)
    assert damage_of(tmp_path / "pack") == []


def test_an_existing_pack_is_replaced_only_when_asked_and_nothing_else_is(plain: Path, packed: Path) -> None:
    with pytest.raises(RequestError, match="exists already: name another folder, or pass --overwrite"):
        pack(plain, packed)
    pack(plain, packed, is_overwriting=True)
    assert read_manifest(packed).dtype == "bf16"
    assert sorted(p.name for p in packed.parent.iterdir()) == ["pack", "plain"]
    with pytest.raises(RequestError, match="is the source itself"):
        pack(plain, plain, is_overwriting=True)
    (plain.parent / "mine").mkdir()
    with pytest.raises(RequestError, match="is not a pack, so --overwrite will not replace it"):
        pack(plain, plain.parent / "mine", is_overwriting=True)


def test_what_appears_at_out_while_it_is_packed_stays(plain: Path, tmp_path: Path) -> None:
    def appear(nbytes: int) -> None:
        (tmp_path / "pack").mkdir(exist_ok=True)
        (tmp_path / "pack" / "thesis").write_text("years of work")

    with pytest.raises(RequestError, match="exists already"):
        pack(plain, tmp_path / "pack", advance=appear)
    assert [path.name for path in (tmp_path / "pack").iterdir()] == ["thesis"]
    (tmp_path / "pack").rename(tmp_path / "elsewhere")
    pack(plain, tmp_path / "pack")
    assert damage_of(tmp_path / "pack") == []


def test_two_packers_of_one_folder_do_not_mix(plain: Path, tmp_path: Path) -> None:
    request = writer.PackRequest(ckpt=plain, out=tmp_path / "pack")
    with (
        writer.Packer.open(request) as packer,
        packer.journal(),
        pytest.raises(RequestError, match="another process packs to"),
    ):
        pack(plain, tmp_path / "pack")


def test_a_full_disk_is_a_sentence_and_what_is_there_is_gone_on_with(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(plain, tmp_path / "whole")

    def full(nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CoopError, match="is full: make room and run the same command again"):
        pack(plain, tmp_path / "pack", advance=full)
    pack(plain, tmp_path / "pack")
    assert_same_folders(tmp_path / "whole", tmp_path / "pack")


def test_too_small_a_disk_is_refused_before_anything_is_written(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SPARE_BYTES", 2**60)
    with pytest.raises(RequestError, match=r"the pack needs .* more on the disk"):
        pack(plain, tmp_path / "pack")
    assert not (tmp_path / ".pack.packing").exists()


@pytest.mark.parametrize("is_overwriting", [True, False])
def test_a_folder_that_is_not_ours_is_left_alone(is_overwriting: bool, plain: Path, tmp_path: Path) -> None:
    hidden = tmp_path / ".pack.packing"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("years of work")
    hidden.symlink_to(tmp_path / "mine")
    with pytest.raises(
        RequestError, match=r"\.pack\.packing is not a folder that coop began .*: move it away"
    ):
        pack(plain, tmp_path / "pack", is_overwriting=is_overwriting)
    hidden.unlink()
    (tmp_path / "mine").rename(hidden)
    with pytest.raises(RequestError, match=r"\.pack\.packing holds files and no journal .*: move it away"):
        pack(plain, tmp_path / "pack", is_overwriting=is_overwriting)
    assert [(path.name, path.read_text()) for path in hidden.iterdir()] == [("thesis", "years of work")]
    assert not (tmp_path / "pack").exists()


def test_a_folder_by_the_name_of_the_replaced_pack_is_left_alone(plain: Path, packed: Path) -> None:
    old = packed.parent / ".pack.old"
    old.mkdir()
    (old / "thesis").write_text("years of work")
    with pytest.raises(RequestError, match=r"\.pack\.old is not a pack, .*: move it away"):
        pack(plain, packed, is_overwriting=True)
    assert (old / "thesis").read_text() == "years of work"


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "1",
        '{"expert": 3}',
        '{"expert": [0, "1"], "sha256": "x", "squares": [0, 0]}',
        '{"expert": [0, 1], "sha256": "x", "squares": [0, 0]}',
        '{"expert": [0, 1], "sha256": 5, "squares": [0, 0]}',
        '{"expert": [0, 1], "sha256": "%s", "squares": [0, -1]}' % ("a" * 64),
        '{"dense": ["x"]}',
        '{"dense": {"model.safetensors": 7}}',
    ],
)
def test_a_line_of_the_journal_that_is_not_ours_is_refused(line: str, plain: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        pack(plain, tmp_path / "pack", advance=killed_after(3))
    with (tmp_path / ".pack.packing" / JOURNAL_NAME).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RequestError, match="lines that coop did not write: pass --overwrite to begin anew"):
        pack(plain, tmp_path / "pack")
    pack(plain, tmp_path / "pack", is_overwriting=True)


@pytest.mark.parametrize("out", ["/proc/x", "note.txt/x"])
def test_a_place_that_cannot_be_written_is_named_as_it_was_given(
    out: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("note.txt").write_text("")
    with pytest.raises(CoopError, match=rf"^--out {out}: cannot be written: .*name another folder$"):
        pack(plain, Path(out))


# the command


def test_an_order_by_a_profile_that_is_not_there_is_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"--order profile: there is none to order by \(none: no coop_prof"
    ):
        pack(plain, tmp_path / "pack", order="profile")


def test_a_profile_may_be_left_out_of_the_order(plain: Path, tmp_path: Path) -> None:
    with_profile(plain, hottest=5)
    assert pack(plain, tmp_path / "pack", order="model").order == "model"
    offsets = [
        e.offset for e in pack_layout(load_config(plain), tmp_path / "pack", torch.bfloat16).layers[0].extents
    ]
    assert offsets == sorted(offsets)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ckpt", "nowhere", "--out", "x"], "--ckpt nowhere: not a folder"),
        (["--ckpt", "."], "say where the pack goes with --out DIR, or check one with --verify"),
        (["--ckpt", ".", "--verify", "--base", "x"], "belong to packing: pass --out DIR too"),
        (["--ckpt", ".", "--out", "x", "--eval", "none.jsonl"], "--eval none.jsonl: not a file"),
        (["--ckpt", ".", "--out", "x", "--eval-tokens", "1"], "pass a number from 2 to"),
        (["--ckpt", ".", "--out", "x", "--json", "no/such/file"], "--json no/such/file: pass a file name"),
        (["--ckpt", ".", "--out", "x"], "config.json"),
        (["--ckpt", ".", "--verify"], ". is not a pack: it has no coop_pack.json"),
    ],
)
def test_the_command_line_refuses_with_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_command_measures_source_and_pack_over_the_same_tokens(
    plain: Path, tmp_path: Path, capsys: Any
) -> None:
    save_tokenizer(plain)
    rows = [{"text": f"w{i} w{i + 1} w{2 * i} w7"} for i in range(3, 40)]
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    arguments = [
        "--ckpt",
        str(plain),
        "--out",
        str(tmp_path / "pack"),
        "--eval",
        str(tmp_path / "eval.jsonl"),
    ]
    arguments += ["--eval-tokens", "100", "--verify", "--json", str(tmp_path / "report.json")]
    assert command.main(arguments) == 0
    said = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    measured = report["measured"]
    assert measured == read_manifest(tmp_path / "pack").measured.model_dump(mode="json")
    assert (
        measured["tokens"] == 75 and report["differing"] == []
    )  # 25 rows of four tokens, the first is given
    assert measured["perplexity"][0] == measured["perplexity"][1] > 1
    assert measured["relative_rms"] == 0 and min(measured["tokens_per_s"]) > 0
    assert re.search(
        r"decoding [\d.]+ tokens/s with .*iB of experts resident -> [\d.]+ tokens/s with .*iB of", said
    )
    assert "perplexity over 75 tokens" in said and "next: coop generate --ckpt" in said


def test_the_speed_of_a_source_that_merges_its_adapter_is_left_out() -> None:
    source = pack_measure.Measurement(2.0, 9, 1.25, 2**20)
    packed = pack_measure.Measurement(2.0, 9, 34.3, 2**21)
    packer = SimpleNamespace(checkpoint=SimpleNamespace(adapter="adapter_model.safetensors"))
    (line,) = command._measured_lines(packer, (source, packed))[1:]  # type: ignore[arg-type]
    assert line.startswith(
        "  decoding 34.3 tokens/s with 2.0 MiB of experts resident; the source's speed is left out"
    )
    assert "1.2" not in line


def test_perplexity_is_that_of_each_row_alone(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    texts = [[3 + (i * k) % 90 for i in range(k)] for k in (9, 4, 17, 2, 30)]
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        losses = [
            float(model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss) * (len(ids) - 1)
            for ids in texts
        ]
    monkeypatch.setattr(pack_measure, "BATCH_TOKENS", 40)
    seen: list[int] = []
    measured = pack_measure.measure_model(plain, None, texts, seen.append)
    assert measured.tokens == 57 and seen == [9 + 4, 17 + 2, 30]
    assert measured.perplexity == pytest.approx(
        np.exp(sum(losses) / 57), rel=0.02
    )  # bfloat16 against float32


def test_a_row_without_text_is_named_by_its_line(plain: Path, tmp_path: Path, capsys: Any) -> None:
    save_tokenizer(plain)
    (tmp_path / "eval.jsonl").write_text('{"text": "w3 w4"}\n{"x": 1}\n')
    arguments = [
        "--ckpt",
        str(plain),
        "--out",
        str(tmp_path / "pack"),
        "--eval",
        str(tmp_path / "eval.jsonl"),
    ]
    assert command.main(arguments) == 2
    assert "eval.jsonl:2: has neither messages nor text" in capsys.readouterr().err
    assert not (tmp_path / ".pack.packing").exists()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_says_that_the_same_command_goes_on(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(writer, "_write_at", interrupted)
    assert command.main(["--ckpt", str(plain), "--out", str(tmp_path / "pack")]) == 130
    assert capsys.readouterr().err.endswith("interrupted: the same command goes on where this one stopped\n")


def test_ctrl_c_before_anything_was_written_says_so(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(writer, "_check_room", interrupted)
    assert command.main(["--ckpt", str(plain), "--out", str(tmp_path / "pack")]) == 130
    assert capsys.readouterr().err.endswith("interrupted: nothing was written yet\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain"]


def test_progress_is_lines_where_nobody_watches_a_bar(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(command, "PROGRESS_SECONDS", 0.0)
    assert command.main(["--ckpt", str(plain), "--out", str(tmp_path / "pack")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 24 and all(line.startswith("packing: ") for line in lines)


def save_tokenizer(folder: Path) -> None:
    """A word-level tokenizer of w0 to w95."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
