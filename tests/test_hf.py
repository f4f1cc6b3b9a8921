"""Checkpoints in K3's names: the golden file both ways, every row of the table, and what is
refused.
"""

import dataclasses
import json
import math
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from k31fn import balance, config, hf, model, params, random, tree
from k31fn.hf_format.table import ROWS, VISION, entries
from k31fn.layers import dsa, mhc, plain_residual, projector, vision, vision_block
from tests import small
from tests.hf_format.test_vision_config import PUBLISHED

GOLDEN = Path(__file__).parent / "golden" / "k3_text_tiny"
CONFIGS = Path(__file__).parents[1] / "configs"
LAYER = "language_model.model.layers."


@pytest.fixture(scope="module")
def stored():
    return load_file(GOLDEN / "model.safetensors")


@pytest.fixture(scope="module")
def golden():
    cfg = hf.config_from_hf(GOLDEN)
    return cfg, *hf.load(GOLDEN, cfg)


@pytest.fixture(scope="module")
def k31():
    """A tiny K3.1 with random weights and balance, in bfloat16 with float32 islands."""
    cfg = config.load(CONFIGS / "tiny.py")
    weights = params.init(model.specs(cfg), random.key(1))
    bias = random.normal(random.key(2), (3, cfg.sublayers["moe"].num_experts))
    return cfg, weights, balance.State(bias, model.moe_layers(cfg))


def with_eyes(cfg):
    tower = vision.Config(vision_block.Config(16, 2, 8, 24), 2, patch_size=14, table_size=(3, 5))
    return dataclasses.replace(cfg, vision=tower, projector=projector.Config(64, cfg.hidden_size))


def checkpoint(directory, tensors):
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    return directory


def assert_same(a, b):
    tree.map(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), a, b)


class TestGolden:
    def test_values_are_where_they_belong(self, golden, stored):
        """Each transform once, written out by hand."""
        _, weights, state = golden
        kda, mla, moe = weights.layers[1].attn, weights.layers[3].attn, weights.layers[3].ffn

        def at(layer, name):
            return stored[f"{LAYER}{layer}.{name}"]

        assert torch.equal(kda.w_q, at(1, "self_attn.q_proj.weight").T)
        assert torch.equal(kda.conv_v.weight, at(1, "self_attn.v_conv1d.weight")[:, 0, :])
        assert torch.equal(kda.A_log, at(1, "self_attn.A_log")[:4])
        assert torch.equal(kda.dt_bias, at(1, "self_attn.dt_bias"))
        assert torch.equal(mla.w_qa, at(3, "self_attn.q_a_proj.weight").T)
        assert torch.equal(mla.w_kvb, at(3, "self_attn.kv_b_proj.weight").T)
        assert torch.equal(
            weights.layers[3].attn_mix.query, at(3, "self_attention_res_proj.weight")[0]
        )
        assert torch.equal(moe.experts.w_down[5], at(3, "block_sparse_moe.experts.5.w2.weight").T)
        assert torch.equal(moe.experts.w_up[5], at(3, "block_sparse_moe.experts.5.w3.weight").T)
        assert torch.equal(weights.layers[0].ffn.w_gate, at(0, "mlp.gate_proj.weight").T)
        assert torch.equal(weights.layers[0].ffn.w_down, at(0, "mlp.down_proj.weight").T)
        assert torch.equal(
            weights.embedding.weight, stored["language_model.model.embed_tokens.weight"]
        )
        assert torch.equal(weights.head, stored["language_model.lm_head.weight"].T)
        layer = weights.layers[2]
        for name, value in {
            "input_layernorm.weight": layer.attn_norm.weight,
            "post_attention_layernorm.weight": layer.ffn_norm.weight,
            "self_attention_res_norm.weight": layer.attn_mix.norm,
            "mlp_res_norm.weight": layer.ffn_mix.norm,
            "mlp_res_proj.weight": layer.ffn_mix.query[None],
            "self_attn.k_proj.weight": layer.attn.w_k.T,
            "self_attn.v_proj.weight": layer.attn.w_v.T,
            "self_attn.g_proj.weight": layer.attn.w_g.T,
            "self_attn.o_proj.weight": layer.attn.w_o.T,
            "self_attn.q_conv1d.weight": layer.attn.conv_q.weight[:, None],
            "self_attn.k_conv1d.weight": layer.attn.conv_k.weight[:, None],
            "block_sparse_moe.experts.0.w1.weight": layer.ffn.experts.w_gate[0].T,
            "block_sparse_moe.shared_experts.gate_proj.weight": layer.ffn.shared.w_gate.T,
            "block_sparse_moe.shared_experts.up_proj.weight": layer.ffn.shared.w_up.T,
        }.items():
            assert torch.equal(value, at(2, name)), (
                name
            )  # these differ from a neighbour of the same shape
        assert torch.equal(weights.final_norm.weight, stored["language_model.model.norm.weight"])
        assert torch.equal(
            weights.final_mix.norm, stored["language_model.model.output_attn_res_norm.weight"]
        )
        assert state.layers == (1, 2, 3, 4, 5, 6, 7)
        for row, number in enumerate(state.layers):
            assert torch.equal(
                state.bias[row], at(number, "block_sparse_moe.gate.e_score_correction_bias")
            )

    def test_every_leaf_is_contiguous_and_owns_its_memory(self, golden):
        """A view of the mapped file would keep it open, and an optimiser would write into it."""
        _, weights, _ = golden
        for path, leaf in tree.flatten_with_paths(weights):
            assert leaf.is_contiguous(), path
            assert leaf.untyped_storage().nbytes() == leaf.nbytes, path

    def test_export_reproduces_the_file(self, golden, stored, tmp_path):
        cfg, weights, state = golden
        hf.export(weights, state, cfg, tmp_path)
        exported = load_file(tmp_path / "model.safetensors")
        assert exported.keys() == stored.keys()
        for name, value in stored.items():
            assert (exported[name].shape, exported[name].dtype) == (value.shape, value.dtype), name
            assert torch.equal(exported[name], value), name
        # not a bit differs from what the safetensors library wrote, header included
        assert (tmp_path / "model.safetensors").read_bytes() == (
            GOLDEN / "model.safetensors"
        ).read_bytes()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]

    def test_exported_config_says_what_the_golden_one_says(self, golden, tmp_path):
        cfg, weights, state = golden
        hf.export(weights, state, cfg, tmp_path)
        ours, theirs = (json.loads((d / "config.json").read_text()) for d in (tmp_path, GOLDEN))
        assert ours["architectures"] == theirs["architectures"]
        assert ours["model_type"] == theirs["model_type"]
        told = {k: v for k, v in theirs["text_config"].items() if k in ours["text_config"]}
        assert told == {k: ours["text_config"][k] for k in told}
        untold = {
            "head_dim",
            "max_position_embeddings",
            "pad_token_id",
            "bos_token_id",
            "eos_token_id",
        }
        assert theirs["text_config"].keys() - told.keys() == untold
        assert hf.config_from_hf(tmp_path) == cfg

    def test_names_of_a_tree(self, golden, stored):
        cfg, weights, _ = golden
        named = hf.to_names(weights, cfg)
        assert stored.keys() - named.keys() == {
            n for n in stored if n.endswith("e_score_correction_bias")
        }
        assert all(torch.equal(value, stored[name]) for name, value in named.items())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_dtype(self, golden, dtype):
        """Islands and the balance stay at least float32."""
        cfg, weights, state = golden
        cast, bias = hf.load(GOLDEN, cfg, dtype=dtype)
        assert_same(cast, params.cast(weights, model.specs(cfg), dtype))
        assert cast.layers[0].attn.A_log.dtype == torch.promote_types(dtype, torch.float32)
        assert cast.layers[0].attn.w_q.dtype == dtype
        assert torch.equal(bias.bias, state.bias.to(torch.promote_types(dtype, torch.float32)))


class TestRoundTrip:
    def test_k31(self, k31, tmp_path):
        cfg, weights, state = k31
        hf.export(weights, state, cfg, tmp_path)
        assert hf.config_from_hf(tmp_path) == cfg
        again, bias = hf.load(tmp_path, cfg)
        assert_same(again, weights)
        assert_same(bias, state)
        index = weights.layers[3].attn.indexer
        stored = load_file(tmp_path / "model.safetensors")
        assert torch.equal(stored[f"{LAYER}3.self_attn.indexer.k_norm.weight"], index.k_norm_weight)
        assert torch.equal(stored[f"{LAYER}3.self_attn.indexer.k_norm.bias"], index.k_norm_bias)
        assert torch.equal(stored[f"{LAYER}3.self_attn.indexer.wk.weight"], index.w_k.T)
        text = json.loads((tmp_path / "config.json").read_text())
        assert text["architectures"] == ["KimiK31ForConditionalGeneration"]
        assert text["text_config"]["dsa_config"]["full_attn_layers"] == [4]

    @pytest.mark.parametrize("quantise", [False, True])
    def test_k31_with_vision(self, k31, tmp_path, quantise):
        """Bit for bit what a checkpoint can say: all of it, or experts whose values MXFP4 has."""
        cfg = with_eyes(k31[0])
        drawn = params.init(model.specs(cfg), random.key(1))
        hf.export(drawn, k31[2], cfg, tmp_path / "one", quantise=quantise)
        assert hf.config_from_hf(tmp_path / "one") == cfg
        weights, state = hf.load(tmp_path / "one", cfg)
        assert_same(weights.vision, drawn.vision)
        assert_same(weights.projector, drawn.projector)
        hf.export(weights, state, cfg, tmp_path / "two", quantise=quantise)
        for file in (tmp_path / "one").iterdir():
            assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
        text, _ = hf.load(tmp_path / "one", k31[0])
        assert_same(text, dataclasses.replace(weights, vision=(), projector=()))

    def test_float32_islands_stay_float32(self, k31, tmp_path):
        """exp(A_log) of log 15.3 differs by 0.65% after a trip through bfloat16."""
        cfg, weights, state = k31
        first = weights.layers[0]
        slow = torch.full_like(first.attn.A_log, math.log(15.3))
        attn = dataclasses.replace(first.attn, A_log=slow)
        weights = dataclasses.replace(
            weights, layers=(dataclasses.replace(first, attn=attn), *weights.layers[1:])
        )
        hf.export(params.cast(weights, model.specs(cfg), torch.bfloat16), state, cfg, tmp_path)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            dtypes = {name: file.get_slice(name).get_dtype() for name in list(file.keys())}
        wide = {re.sub(r"\d+", "N", name) for name, dtype in dtypes.items() if dtype == "F32"}
        attn_names = (
            "A_log",
            "dt_bias",
            "q_convNd.weight",
            "k_convNd.weight",
            "v_convNd.weight",
            "o_norm.weight",
        )
        expected = {f"{LAYER}N.self_attn.{name}" for name in attn_names}
        assert wide == expected | {f"{LAYER}N.block_sparse_moe.gate.e_score_correction_bias"}
        again, _ = hf.load(tmp_path, cfg, dtype=torch.bfloat16)
        assert torch.equal(again.layers[0].attn.A_log, slow)

    def test_plain_residual_and_no_moe_layer(self, k31, tmp_path):
        cfg = small.replace(k31[0], residual=plain_residual.Config(), num_dense_layers=4)
        weights = params.init(model.specs(cfg), random.key(1))
        state = balance.init((), cfg.sublayers["moe"].num_experts)
        hf.export(weights, state, cfg, tmp_path)
        assert hf.config_from_hf(tmp_path) == cfg
        again, bias = hf.load(tmp_path, cfg)
        assert_same(again, weights)
        assert (bias.bias.shape, bias.layers) == ((0, cfg.sublayers["moe"].num_experts), ())

    def test_shards(self, golden, stored, tmp_path):
        cfg, weights, state = golden
        names, index = sorted(stored), {}
        for shard in range(3):
            part = names[shard::3]
            save_file({n: stored[n] for n in part}, tmp_path / f"part-{shard}.safetensors")
            index |= dict.fromkeys(part, f"part-{shard}.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        again, bias = hf.load(tmp_path, cfg)
        assert_same(again, weights)
        assert_same(bias, state)


class TestTable:
    def test_every_row_is_used(self, golden, k31):
        used = {entry.row for cfg in (golden[0], with_eyes(k31[0])) for entry in entries(cfg)}
        assert used == set(ROWS)

    def test_a_leaf_without_a_row(self, golden):
        with pytest.raises(ValueError, match=r"params\.head is covered by 0 rows"):
            entries(golden[0], tuple(row for row in ROWS if row.path != "params.head"))

    def test_a_leaf_with_two_rows(self, golden):
        with pytest.raises(
            ValueError,
            match=r"head is covered by 2 rows \['language_model\.lm_head\.weight', 'b'\]",
        ):
            entries(golden[0], (*ROWS, ROWS[0]._replace(name="b", path="params.head")))

    def test_a_name_of_two_leaves(self, golden):
        rows = tuple(
            row._replace(name="language_model.model.norm.weight")
            if row.path == "params.head"
            else row
            for row in ROWS
        )
        with pytest.raises(
            ValueError, match=r"language_model\.model\.norm\.weight is the name of 2 leaves"
        ):
            entries(golden[0], rows)

    def test_the_released_names_and_shapes(self):
        """Names, shapes and counts of the full-size checkpoint, from the published file
        (unquantised) and, for the indexer, from public loaders of K3.1."""
        found = {}
        for entry in entries(config.load(CONFIGS / "k31_pro.py")):
            if entry.names[0].startswith(VISION):
                continue  # tests/hf_format/test_slices.py
            shape = entry.stored_shape
            for name in entry.names:
                found.setdefault(re.sub(r"\.\d+\.", ".N.", name), Counter())[shape] += 1
        layers, attn = f"{LAYER}N.", f"{LAYER}N.self_attn."
        moe = f"{layers}block_sparse_moe."
        expected = {
            "language_model.model.embed_tokens.weight": ((163840, 7168), 1),
            "language_model.lm_head.weight": ((163840, 7168), 1),
            "language_model.model.norm.weight": ((7168,), 1),
            "language_model.model.output_attn_res_norm.weight": ((7168,), 1),
            "language_model.model.output_attn_res_proj.weight": ((1, 7168), 1),
            f"{layers}input_layernorm.weight": ((7168,), 93),
            f"{layers}post_attention_layernorm.weight": ((7168,), 93),
            f"{layers}self_attention_res_norm.weight": ((7168,), 93),
            f"{layers}self_attention_res_proj.weight": ((1, 7168), 93),
            f"{layers}mlp_res_norm.weight": ((7168,), 93),
            f"{layers}mlp_res_proj.weight": ((1, 7168), 93),
            f"{layers}mlp.gate_proj.weight": ((33792, 7168), 1),
            f"{layers}mlp.up_proj.weight": ((33792, 7168), 1),
            f"{layers}mlp.down_proj.weight": ((7168, 33792), 1),
            f"{attn}q_proj.weight": ((12288, 7168), 69),
            f"{attn}k_proj.weight": ((12288, 7168), 69),
            f"{attn}v_proj.weight": ((12288, 7168), 69),
            f"{attn}q_conv1d.weight": ((12288, 1, 4), 69),
            f"{attn}k_conv1d.weight": ((12288, 1, 4), 69),
            f"{attn}v_conv1d.weight": ((12288, 1, 4), 69),
            f"{attn}f_a_proj.weight": ((128, 7168), 69),
            f"{attn}f_b_proj.weight": ((12288, 128), 69),
            f"{attn}b_proj.weight": ((96, 7168), 69),
            f"{attn}A_log": ((128,), 69),
            f"{attn}dt_bias": ((12288,), 69),
            f"{attn}o_norm.weight": ((128,), 69),
            f"{attn}g_proj.weight": ((12288, 7168), 93),
            f"{attn}o_proj.weight": ((7168, 12288), 93),
            f"{attn}q_a_proj.weight": ((1536, 7168), 24),
            f"{attn}q_a_layernorm.weight": ((1536,), 24),
            f"{attn}q_b_proj.weight": ((18432, 1536), 24),
            f"{attn}kv_a_proj_with_mqa.weight": ((576, 7168), 24),
            f"{attn}kv_a_layernorm.weight": ((512,), 24),
            f"{attn}kv_b_proj.weight": ((24576, 512), 24),
            f"{attn}indexer.wq_b.weight": ((4096, 1536), 24),
            f"{attn}indexer.wk.weight": ((128, 7168), 24),
            f"{attn}indexer.weights_proj.weight": ((32, 7168), 24),
            f"{attn}indexer.k_norm.weight": ((128,), 24),
            f"{attn}indexer.k_norm.bias": ((128,), 24),
            f"{moe}gate.weight": ((896, 7168), 92),
            f"{moe}gate.e_score_correction_bias": ((896,), 92),
            f"{moe}routed_expert_down_proj.weight": ((3584, 7168), 92),
            f"{moe}routed_expert_norm.weight": ((3584,), 92),
            f"{moe}routed_expert_up_proj.weight": ((7168, 3584), 92),
            f"{moe}shared_experts.gate_proj.weight": ((6144, 7168), 92),
            f"{moe}shared_experts.up_proj.weight": ((6144, 7168), 92),
            f"{moe}shared_experts.down_proj.weight": ((7168, 6144), 92),
            f"{moe}experts.N.w1.weight": ((3072, 3584), 82432),
            f"{moe}experts.N.w2.weight": ((3584, 3072), 82432),
            f"{moe}experts.N.w3.weight": ((3072, 3584), 82432),
        }
        assert found == {name: Counter({shape: count}) for name, (shape, count) in expected.items()}


class TestLoadRefuses:
    def test_everything_wrong_is_in_one_message(self, golden, stored, tmp_path):
        wrong = dict(stored)
        for expert in range(8):
            del wrong[f"{LAYER}2.block_sparse_moe.experts.{expert}.w1.weight"]
        del wrong["language_model.model.norm.weight"]
        wrong["language_model.model.norm.bias"] = torch.zeros(64)
        wrong["lm_head.weight"] = torch.zeros(128, 64)
        wrong[f"{LAYER}1.self_attn.A_log"] = torch.zeros(4)
        wrong[f"{LAYER}3.self_attn.q_a_proj.weight"] = torch.zeros(64, 24)
        wrong[f"{LAYER}1.self_attn.dt_bias"] = torch.zeros(64, dtype=torch.int64)
        with pytest.raises(ValueError, match="does not fit the config") as caught:
            hf.load(checkpoint(tmp_path, wrong), golden[0])
        assert str(caught.value).splitlines()[1:] == [
            "9 missing:",
            f"  {LAYER}2.block_sparse_moe.experts.0.w1.weight  (and 7 like it)",
            "  language_model.model.norm.weight",
            "2 not of this model:",
            "  language_model.model.norm.bias",
            "  lm_head.weight",
            "2 of another shape:",
            f"  {LAYER}1.self_attn.A_log: [4], wanted [128]",
            f"  {LAYER}3.self_attn.q_a_proj.weight: [64, 24], wanted [24, 64]",
            "1 of another dtype:",
            f"  {LAYER}1.self_attn.dt_bias: I64, wanted F32/F64",
            "fix: load with the config of this checkpoint: k31fn.hf.config_from_hf(directory)",
        ]

    def test_a_k3_checkpoint_as_k31(self, golden, k31):
        """Another model altogether: still one line per kind of weight."""
        with pytest.raises(ValueError, match=r"\d+ missing:(\n.*)+indexer\.wq_b\.weight") as caught:
            hf.load(GOLDEN, k31[0])
        assert len(str(caught.value).splitlines()) < 80

    def test_only_experts_may_be_quantised(self, golden, stored, tmp_path):
        name = f"{LAYER}1.block_sparse_moe.shared_experts.gate_proj.weight"
        packed = {n: v for n, v in stored.items() if n != name}
        packed[f"{name}_packed"] = torch.zeros(48, 32, dtype=torch.uint8)
        with pytest.raises(
            ValueError, match="fix: only the weights of routed experts may be quantised"
        ):
            hf.load(checkpoint(tmp_path, packed), golden[0])

    def test_vision_weights_are_left_out(self, golden, stored, tmp_path):
        whole = stored | {
            "vision_tower.pos_emb.weight": torch.zeros(2),
            "mm_projector.proj.0.weight": torch.zeros(2),
        }
        weights, _ = hf.load(checkpoint(tmp_path, whole), golden[0])
        assert_same(weights, golden[1])

    def test_mtp(self, k31):
        cfg = small.replace(k31[0], num_mtp_layers=1)
        with pytest.raises(
            ValueError,
            match=r"mtp=.*: K3's checkpoint format has no MTP layer; set it to \(\)",
        ):
            hf.load(GOLDEN, cfg)

    def test_a_residual_scheme_that_the_format_does_not_know(self, k31, tmp_path):
        cfg = dataclasses.replace(k31[0], residual=mhc.Config())
        with pytest.raises(
            ValueError, match=r"residual is an mhc\.Config, which K3's format has no name for"
        ):
            hf.export(
                params.init(model.specs(cfg), random.key(0)),
                model.init_balance(cfg),
                cfg,
                tmp_path / "x",
            )
        assert not (tmp_path / "x").exists()

    def test_no_checkpoint(self, golden, tmp_path):
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(
            ValueError, match=r"holds neither model\.safetensors nor .*pytorch_model\.bin"
        ):
            hf.load(tmp_path, golden[0])
        with pytest.raises(ValueError, match="no such directory"):
            hf.load(tmp_path / "nowhere", golden[0])

    def test_a_cut_file(self, golden, tmp_path):
        data = (GOLDEN / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match="is not a complete safetensors file"):
            hf.load(tmp_path, golden[0])

    def test_a_file_and_an_index(self, golden, tmp_path):
        shutil.copy(GOLDEN / "model.safetensors", tmp_path)
        (tmp_path / "model.safetensors.index.json").write_text("{}")
        with pytest.raises(ValueError, match="holds both"):
            hf.load(tmp_path, golden[0])

    @pytest.mark.parametrize(
        ("index", "message"),
        [
            ("{", "is not JSON"),
            ("[]", "must hold a JSON object"),
            ("{}", "has no weight_map"),
            ('{"weight_map": {"a": "../model.safetensors"}}', "which is not the name of a file"),
            ('{"weight_map": {"a": "absent.safetensors"}}', r"absent\.safetensors does not exist"),
            ('{"weight_map": {"b": "part.safetensors"}}', r"lacks \['b'\], has \['a'\] more"),
        ],
    )
    def test_a_wrong_index(self, golden, tmp_path, index, message):
        save_file({"a": torch.zeros(1)}, tmp_path / "part.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ValueError, match=message):
            hf.load(tmp_path, golden[0])


class TestExportRefuses:
    def test_a_leaf_of_another_shape(self, k31, tmp_path):
        cfg, weights, state = k31
        with pytest.raises(
            ValueError, match=r"params\.head has shape \[128, 263\], cfg wants \[128, 264\]"
        ):
            hf.export(
                dataclasses.replace(weights, head=weights.head[:, 1:]), state, cfg, tmp_path / "new"
            )
        assert not (tmp_path / "new").exists()

    def test_another_structure(self, k31, golden, tmp_path):
        with pytest.raises(ValueError, match="trees differ in structure"):
            hf.export(golden[1], k31[2], k31[0], tmp_path)

    def test_balance_of_other_layers(self, k31, tmp_path):
        cfg, weights, state = k31
        with pytest.raises(
            ValueError,
            match=r"balance\.State\.layers=\(0, 1, 2\) must be the MoE layers .*\(1, 2, 3\)",
        ):
            hf.export(weights, balance.State(state.bias, (0, 1, 2)), cfg, tmp_path)

    def test_an_unusual_dtype(self, k31, tmp_path):
        cfg, weights, state = k31
        with pytest.raises(ValueError, match="cannot store"):
            hf.export(
                dataclasses.replace(weights, head=weights.head.to(torch.float8_e4m3fn)),
                state,
                cfg,
                tmp_path,
            )

    def test_a_directory_with_shards(self, k31, tmp_path):
        (tmp_path / "model.safetensors.index.json").write_text("{}")
        with pytest.raises(ValueError, match="use another directory"):
            hf.export(k31[1], k31[2], k31[0], tmp_path)

    def test_what_the_format_cannot_say(self, k31, tmp_path):
        cfg, weights, state = k31
        assert isinstance(cfg.sublayers["full_attention"], dsa.Config)
        index = dataclasses.replace(cfg.sublayers["full_attention"].indexer, score_scale=0.5)
        odd = small.replace(
            cfg,
            full_attention=dataclasses.replace(cfg.sublayers["full_attention"], indexer=index),
            moe=dataclasses.replace(cfg.sublayers["moe"], beta=3.0),
        )
        with pytest.raises(
            ValueError,
            match=r"cannot say: full_attention\.indexer\.score_scale=0\.5.*; moe\.beta=3\.0",
        ):
            hf.export(weights, state, odd, tmp_path)

    def test_what_only_training_reads_is_no_obstacle(self, k31, tmp_path):
        cfg, weights, state = k31
        assert isinstance(cfg.sublayers["full_attention"], dsa.Config)
        other = small.replace(
            cfg,
            kda=dataclasses.replace(
                cfg.sublayers["kda"], A_log_init=params.Uniform(0.0, 1.0), init_std=0.1
            ),
            full_attention=dataclasses.replace(
                cfg.sublayers["full_attention"], stage="dense_warmup"
            ),
            indexer_weight=0.5,
        )
        hf.export(weights, state, other, tmp_path)
        assert hf.config_from_hf(tmp_path) == cfg

    def test_a_failed_write_leaves_nothing(self, golden, tmp_path, monkeypatch):
        cfg, weights, state = golden

        def full_disk(*_):
            raise OSError("no space left on device")

        for call in ("fsync", "pwrite", "replace"):
            with monkeypatch.context() as patch:
                patch.setattr(os, call, full_disk)
                with pytest.raises(OSError, match="no space left"):
                    hf.export(weights, state, cfg, tmp_path / "new")
            assert not list(tmp_path.iterdir())

    def test_a_folder_with_something_in_it(self, golden, tmp_path):
        cfg, weights, state = golden
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(ValueError, match="is not empty; use another directory"):
            hf.export(weights, state, cfg, tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
        assert not list(tmp_path.parent.glob(".*.partial"))

    def test_a_folder_that_cannot_be_made(self, golden, tmp_path):
        cfg, weights, state = golden
        (tmp_path / "file").touch()
        with pytest.raises(
            ValueError,
            match=r"^no folder can be made in '.*/file': Not a directory; use another dir",
        ):
            hf.export(weights, state, cfg, tmp_path / "file" / "out")


class TestConfigFromHf:
    def write(self, directory, change=None):
        data = json.loads((GOLDEN / "config.json").read_text())
        for path, value in (change or {}).items():
            *groups, last = path.split(".")
            at = data["text_config"]
            for group in groups:
                at = at.setdefault(group, {})
            at.pop(last, None) if value is ... else at.update({last: value})
        (directory / "config.json").write_text(json.dumps(data))
        return directory

    def test_golden(self, golden):
        cfg = golden[0]
        assert cfg.layers == small.k3_layers(8, (3, 7), 1)
        assert (
            cfg.sublayers["moe"].shared_size,
            cfg.sublayers["moe"].top_k,
            cfg.residual.block_size,
        ) == (48, 2, 3)
        assert (
            cfg.sublayers["full_attention"].latent_norm_eps,
            cfg.norm_eps,
            cfg.sublayers["kda"].gate_lower_bound,
        ) == (
            1e-6,
            1e-5,
            -5.0,
        )

    def test_the_published_config_is_ours(self, tmp_path):
        """text_config of the released K3, without what says nothing about the model."""
        full = [*range(4, 93, 4), 93]
        text = {
            **{
                "hidden_act": "situ",
                "activation_situ_beta": 4.0,
                "activation_situ_linear_beta": 25.0,
            },
            **{"attn_res_block_size": 12, "first_k_dense_replace": 1, "hidden_size": 7168},
            **{
                "intermediate_size": 33792,
                "kv_lora_rank": 512,
                "latent_moe_use_norm": True,
                "mla_use_nope": True,
            },
            **{
                "mla_use_output_gate": True,
                "model_type": "kimi_linear",
                "moe_intermediate_size": 3072,
            },
            **{
                "moe_layer_freq": 1,
                "moe_renormalize": True,
                "moe_router_activation_func": "sigmoid",
            },
            **{
                "num_attention_heads": 96,
                "num_expert_group": 1,
                "num_experts": 896,
                "num_experts_per_token": 16,
            },
            **{"num_hidden_layers": 93, "num_key_value_heads": 96, "num_nextn_predict_layers": 0},
            **{
                "num_shared_experts": 2,
                "q_lora_rank": 1536,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
            },
            **{
                "rms_norm_eps": 1e-05,
                "routed_expert_hidden_size": 3584,
                "routed_scaling_factor": 1.0,
            },
            **{
                "tie_word_embeddings": False,
                "topk_group": 1,
                "use_grouped_topk": True,
                "v_head_dim": 128,
            },
            **{
                "vocab_size": 163840,
                "max_position_embeddings": 1048576,
                "quantization_config": {"format": "mxfp4"},
            },
            "linear_attn_config": {
                "full_attn_layers": full,
                "kda_layers": [i for i in range(1, 94) if i not in full],
                **{"gate_lower_bound": -5.0, "head_dim": 128, "num_heads": 96},
                **{"short_conv_kernel_size": 4, "use_full_rank_gate": True},
            },
        }
        (tmp_path / "config.json").write_text(
            json.dumps({"text_config": text, "vision_config": PUBLISHED})
        )
        assert hf.config_from_hf(tmp_path) == config.load(CONFIGS / "k3.py")
        (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
        assert hf.config_from_hf(tmp_path) == dataclasses.replace(
            config.load(CONFIGS / "k3.py"), vision=(), projector=()
        )
        wrong = {"text_config": text, "vision_config": PUBLISHED | {"attn_bias": True}}
        (tmp_path / "config.json").write_text(json.dumps(wrong))
        with pytest.raises(
            ValueError,
            match=r"config\.json: vision_config does not .* attn_bias=True must be False",
        ):
            hf.config_from_hf(tmp_path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"hidden_act": "silu"}, "hidden_act='silu' must be 'situ'"),
            ({"hidden_act": ...}, "hidden_act is missing"),
            ({"mla_use_nope": False}, "mla_use_nope=False must be True"),
            ({"mla_use_output_gate": ...}, "mla_use_output_gate is missing"),
            ({"moe_router_activation_func": "softmax"}, "must be 'sigmoid'"),
            ({"moe_renormalize": False}, "moe_renormalize=False must be True"),
            ({"latent_moe_use_norm": False}, "latent_moe_use_norm=False must be True"),
            ({"num_expert_group": 4}, "num_expert_group=4 must be 1"),
            ({"topk_group": 2}, "topk_group=2 must be 1"),
            ({"topk_method": "greedy"}, "topk_method='greedy' must be 'noaux_tc'"),
            ({"moe_layer_freq": 2}, "moe_layer_freq=2 must be 1"),
            ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1 must be 0"),
            ({"tie_word_embeddings": True}, "tie_word_embeddings=True must be False"),
            ({"rope_scaling": {"type": "yarn"}}, "rope_scaling=.* must be None"),
            ({"num_key_value_heads": 2}, "num_key_value_heads=2 must equal num_attention_heads=4"),
            ({"q_lora_rank": None}, "q_lora_rank=None must be a number"),
            ({"num_hidden_layers": 2.5}, r"num_hidden_layers=2\.5 must be a number without a fra"),
            ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 must be .* to 10000"),
            ({"num_hidden_layers": True}, "num_hidden_layers=True must be a number"),
            ({"hidden_size": -64}, "hidden_size=-64 must be a number .*, from 1 to"),
            ({"num_experts": 10**12}, "num_experts=1000000000000 must be .*, from 1 to 65536"),
            ({"first_k_dense_replace": 1.0}, r"first_k_dense_replace=1\.0 must be a number"),
            ({"rms_norm_eps": 0}, "rms_norm_eps=0 must be a number, from"),
            ({"rms_norm_eps": 1e-300}, "rms_norm_eps=1e-300 must be a number, from"),
            ({"activation_situ_beta": 0}, "activation_situ_beta=0 must be a number, from"),
            ({"routed_scaling_factor": 0.0}, r"routed_scaling_factor=0\.0 must be a number"),
            ({"num_experts_per_token": 8}, "num_experts_per_token=8 must be less than num_exp"),
            ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must be a number"),
            ({"latent_norm_eps": [1]}, r"latent_norm_eps=\[1\] must be a number"),
            ({"initializer_range": "x"}, "initializer_range='x' must be a number"),
            ({"attn_res_block_size": 0}, "attn_res_block_size=0 must be .*, or null"),
            ({"attn_res_block_size": "3"}, "attn_res_block_size='3' must be .*, or null"),
            ({"mla_use_nope": 1}, "mla_use_nope=1 must be True"),
            ({"topk_group": 1.0}, r"topk_group=1\.0 must be 1"),
            ({"linear_attn_config": "kda"}, r"linear_attn_config\.head_dim is missing"),
            (
                {"linear_attn_config.head_dim": 8.5},
                r"linear_attn_config\.head_dim=8\.5 must be a number",
            ),
            (
                {"linear_attn_config.kda_layers": "1,2,3"},
                r"linear_attn_config\.kda_layers='1,2,3' must be a list of numbers of layers",
            ),
            (
                {"linear_attn_config.full_attn_layers": [4, "8"]},
                r"full_attn_layers=\[4, '8'\] must be a list of numbers of layers",
            ),
            (
                {"linear_attn_config.gate_lower_bound": -100},
                r"config\.json: kda\.Config\.gate_lower_bound=-100\.0 must be in",
            ),
            (
                {
                    "dsa_config": {
                        "index_n_heads": 2,
                        "index_head_dim": None,
                        "index_topk": 0.5,
                        "full_attn_layers": [4, 8],
                    }
                },
                r"dsa_config\.index_head_dim=None must .*dsa_config\.index_topk=0\.5 must",
            ),
            ({"v_head_dim": "16"}, "v_head_dim='16' must be a number"),
            (
                {"linear_attn_config.use_full_rank_gate": False},
                "use_full_rank_gate=False must be True",
            ),
            (
                {"linear_attn_config.gate_lower_bound": ...},
                r"linear_attn_config\.gate_lower_bound is missing",
            ),
            (
                {"linear_attn_config.allow_neg_eigval": True},
                r"linear_attn_config\.allow_neg_eigval is unknown; known:",
            ),
            (
                {"linear_attn_config.kda_layers": [1, 2, 3]},
                r"must name each of the layers 1\.\.8 once",
            ),
            ({"linear_attn_config": None}, r"linear_attn_config\.head_dim is missing"),
            ({"dsa_config": {"topk": 4}}, r"dsa_config\.topk is unknown; known: index_n_heads"),
            (
                {"hidden_act": "silu", "topk_group": 2, "vocab_size": ...},
                "vocab_size is missing; hidden_act=.*topk_group=",
            ),
        ],
    )
    def test_other_equations_are_refused(self, tmp_path, change, message):
        with pytest.raises(ValueError, match=message):
            hf.config_from_hf(self.write(tmp_path, change))

    def test_k31(self, tmp_path):
        sparse = {
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 16,
            "full_attn_layers": [4, 8],
        }
        cfg = hf.config_from_hf(self.write(tmp_path, {"dsa_config": sparse}))
        assert isinstance(cfg.sublayers["full_attention"], dsa.Config)
        index = cfg.sublayers["full_attention"].indexer
        assert (
            index.num_heads,
            index.head_dim,
            cfg.sublayers["full_attention"].topk,
            index.norm_eps,
        ) == (
            2,
            8,
            16,
            1e-5,
        )
        with pytest.raises(ValueError, match=r"must equal linear_attn_config\.full_attn_layers"):
            hf.config_from_hf(
                self.write(tmp_path, {"dsa_config": sparse | {"full_attn_layers": [4]}})
            )

    def test_no_value_of_any_field_is_a_traceback(self, tmp_path):
        """Each field of the file in turn with what no such field can be."""
        text = json.loads((GOLDEN / "config.json").read_text())["text_config"]
        names = [name for name in text if name != "linear_attn_config"]
        names += [f"linear_attn_config.{name}" for name in text["linear_attn_config"]]
        said = {}
        tried = 0
        for name in names:
            for value in ([], {}, "x", 2.5, -1, 10**30, 1e300, True, [[1]], {"a": 1}):
                tried += 1
                try:
                    hf.config_from_hf(self.write(tmp_path, {name: value}))
                except ValueError as error:
                    said[name, str(value)] = str(error)
        file = f"{tmp_path / 'config.json'}: "
        assert not {at: text for at, text in said.items() if not text.startswith(file)}
        assert not {at: text for at, text in said.items() if "\n" in text}
        # Of the others the field is not read, or this is a value for it.
        assert len(said) > 0.7 * tried

    def test_a_whole_number_where_a_fraction_may_stand(self, tmp_path):
        change = {"linear_attn_config.gate_lower_bound": -5, "routed_scaling_factor": 2}
        cfg = hf.config_from_hf(self.write(tmp_path, change))
        found = (cfg.sublayers["kda"].gate_lower_bound, cfg.sublayers["moe"].scale)
        assert repr(found) == "(-5.0, 2.0)"

    @pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
    def test_numbers_that_are_none(self, tmp_path, number):
        text = (GOLDEN / "config.json").read_text()
        changed = re.sub(r'("q_lora_rank":) \d+', rf"\1 {number}", text)
        assert changed != text
        (tmp_path / "config.json").write_text(changed)
        with pytest.raises(ValueError, match=r"config\.json: text_config\.q_lora_rank is "):
            hf.config_from_hf(tmp_path)

    def test_vision_that_is_no_object(self, golden, tmp_path):
        """It would be a model of text alone, in silence."""
        data = json.loads((GOLDEN / "config.json").read_text())
        for value in ([], "x", 3):
            (tmp_path / "config.json").write_text(json.dumps(data | {"vision_config": value}))
            with pytest.raises(ValueError, match=r"vision_config=.* must be an object, or null"):
                hf.config_from_hf(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(data | {"vision_config": None}))
        assert hf.config_from_hf(tmp_path) == golden[0]

    def test_not_a_k3_checkpoint(self, tmp_path):
        with pytest.raises(ValueError, match=r"config\.json': No such file"):
            hf.config_from_hf(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(ValueError, match="has no text_config"):
            hf.config_from_hf(tmp_path)
