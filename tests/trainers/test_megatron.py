"""Megatron-core: parallel layers and a GPTModel at several tensor and expert parallel sizes, equal to one process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import megatron_world as mw
import pytest
import torch
import torch.nn as nn
from common import assert_equal, assert_shards, differing, local_init, same_on_all_ranks, values_of
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import layers as megatron_layers

import torch_shardinit as shardinit
from torch_shardinit.locate import locate
from torch_shardinit.locate.megatron import pieces_of_rank
from torch_shardinit.verify_meter import InitMeter
from torch_shardinit.verify_processes import run_gloo

SEED = 37
Init = Callable[[torch.Tensor], torch.Tensor]


class Layers(nn.Module):
    """Every parallel layer; `init` is what they are given."""

    def __init__(self, init: Init, vocabulary: int = 24, **options: Any) -> None:
        super().__init__()
        options = {"config": mw.config(**options), "init_method": init}
        column = tensor_parallel.ColumnParallelLinear
        self.column = column(8, 24, **options, bias=True)
        self.halves = column(8, 24, **options, bias=True, stride=2)
        self.thirds = column(8, 24, **options, bias=False, stride=3)
        self.row = tensor_parallel.RowParallelLinear(
            24, 6, **options, bias=True, input_is_parallel=True, skip_bias_add=False
        )
        self.row_halves = tensor_parallel.RowParallelLinear(
            24, 6, **options, bias=False, input_is_parallel=True, skip_bias_add=False, stride=2
        )
        self.vocabulary = tensor_parallel.VocabParallelEmbedding(vocabulary, 8, **options)


def normal(tensor: torch.Tensor) -> torch.Tensor:
    return nn.init.normal_(tensor, std=0.02)


def numbered(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.copy_(torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape))


# --- where the elements are -----------------------------------------------------------------------------------------


def test_pieces_are_a_partition() -> None:
    for world in (1, 2, 3, 4):
        for stride in (1, 2, 3):
            size = 6 * stride
            taken = []
            for rank in range(world):
                pieces = pieces_of_rank(size, stride, rank, world)
                assert [start for start, _, _ in pieces] == [i * pieces[0][2] for i in range(len(pieces))]
                taken += [index for _, start, length in pieces for index in range(start, start + length)]
            assert sorted(taken) == list(range(size * world))


def _cut_worker(rank: int, world: int) -> None:
    """Megatron numbers a whole master weight and cuts it itself."""
    for tp in (1, 2, 4):
        with mw.parallel(tp):
            model = Layers(numbered)
            whole = {name: one for name, one in values_of(model).items() if tp == 1}
            truth = {
                name: torch.arange(float(torch.Size(shape).numel())).view(shape)
                for name, shape in {piece.name: piece.global_shape for piece in locate(model).pieces}.items()
            }
            for name in [name for name in truth if name.endswith("bias")]:
                truth[name].zero_()
            assert_shards(model, truth, f"tensor parallel {tp}")
            assert truth["halves.weight"].shape == (24, 8) and truth["row.weight"].shape == (6, 24)
            assert tp > 1 or whole.keys() == truth.keys()
            held = {piece.name: piece for piece in locate(model).pieces}
            assert tp == 1 or held["halves.weight"].local.shape[0] == 24 // tp // 2


def _layers_worker(rank: int, world: int) -> None:
    fans: list[Init] = [normal, nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.orthogonal_]
    for init in fans:
        truth: dict[str, torch.Tensor] = {}
        for tp in (1, 2, 4):
            with mw.parallel(tp):
                with shardinit.recording():
                    model = Layers(init)
                names = [name for name, one in model.named_parameters() if getattr(one, "tensor_model_parallel", False)]
                with local_init(model):
                    shardinit.init_model_(model, SEED, device="cpu")
                truth = truth or values_of(model)
                held = assert_shards(model, truth, f"{init.__name__}, {tp}")
                assert held < 1.5 * sum(one.numel() for one in truth.values()) / tp
                # Optimizers and checkpoints know parameters by what is noted on them.
                kept = [name for name, one in model.named_parameters() if getattr(one, "tensor_model_parallel", False)]
                assert kept == names and model.halves.weight.partition_stride == 2 and model.row.weight.allreduce
                shardinit.init_model_(model, SEED + 1)
                assert tp > 1 or differing(values_of(model), truth)
                # Init code given afterwards, on stand-ins of the whole.
                shardinit.init_model_(model, SEED, init_fn=lambda m, init=init: init(m.halves.weight))
                assert_shards(model, truth, f"{init.__name__}, {tp}, by init_fn")
    bound = (6 / (8 + 24)) ** 0.5  # xavier's, of the whole: a shard's fan would make it larger
    with mw.parallel(4), shardinit.recording():
        model = Layers(nn.init.xavier_uniform_)
    row = next(line for line in str(shardinit.record(model)).splitlines() if line.startswith("column.weight"))
    assert f"uniform(a={-bound:g}, b={bound:g})" in row


def test_layers_equal_those_of_one_process() -> None:
    run_gloo(_in_turn, 4, [_cut_worker, _layers_worker, _padded_worker, _gpu_worker, _local_code_worker], limit=200)


def _in_turn(rank: int, world: int, workers: list[Callable[[int, int], None]]) -> None:
    torch.manual_seed(1000 + rank)
    torch.set_num_threads(1)
    for worker in workers:
        try:
            worker(rank, world)
        except Exception as error:
            raise AssertionError(f"in {worker.__name__}") from error


def _padded_worker(rank: int, world: int) -> None:
    """Vocabularies are padded to a multiple of the ranks; a real row does not depend on that."""
    tables = []
    for tp, padded in ((1, 13), (2, 14), (4, 16), (4, 64)):
        with mw.parallel(tp):
            with shardinit.recording():
                model = Layers(normal, vocabulary=padded)
            shardinit.init_model_(model, SEED, device="cpu")
            weight = model.vocabulary.weight.detach()
            start, stop = model.vocabulary.vocab_start_index, model.vocabulary.vocab_end_index
            tables.append(weight if tp == 1 else tables[0][start:stop])
            assert_equal({"": weight[: max(0, 13 - start)]}, {"": tables[-1]}, f"{padded} rows on {tp} ranks")


def _gpu_worker(rank: int, world: int) -> None:
    """The layers' other way: on a GPU each initialises its part alone, from a generator of the rank's own."""
    truth: dict[str, torch.Tensor] = {}
    for tp in (1, 2, 4):
        with mw.parallel(tp), mock.patch("torch.cuda.current_device", lambda: 0):
            with shardinit.recording():
                model = Layers(nn.init.xavier_normal_, use_cpu_initialization=False)
            assert all(one.is_meta for one in model.parameters())
            shardinit.init_model_(model, SEED, device="cpu")
        with mw.parallel(tp):
            truth = truth or values_of(model)
            assert_shards(model, truth, f"GPU, {tp}")
    with mw.parallel(1):
        with shardinit.recording():
            model = Layers(nn.init.xavier_normal_)
        assert_equal(values_of(shardinit.init_model_(model, SEED, device="cpu")), truth, "both ways")


def _local_code_worker(rank: int, world: int) -> None:
    """Code that sees one rank's part of a parameter can't say what the whole is, unless it writes one constant."""
    with mw.parallel(4):
        with shardinit.recording():
            model = Layers(normal)
            nn.init.constant_(model.column.bias, 0.5)
        shardinit.init_model_(model, SEED, device="cpu")
        assert bool((model.column.bias == 0.5).all()) and not bool(model.halves.bias.any())

        for write, message in (
            (lambda m: nn.init.normal_(m.column.bias), r"ColumnParallelLinear\.bias.*random numbers.*init_fn"),
            (lambda m: numbered(m.column.bias), r"ColumnParallelLinear\.bias.*got different values.*init_fn"),
            (lambda m: nn.init.normal_(m.row.weight), r"RowParallelLinear\.weight is tensor parallel, and was written"),
        ):
            with pytest.raises(shardinit.RecordError, match=message), shardinit.recording():
                model = Layers(normal)
                write(model)
        with shardinit.recording():
            model = Layers(normal)
        with pytest.raises(shardinit.RecordError, match=r"RowParallelLinear\.weight.*random numbers.*init_fn"):
            with shardinit.recording():
                nn.init.normal_(model.row.weight)
        with shardinit.recording():
            model = Layers(normal, perform_initialization=False)
        with pytest.raises(shardinit.UninitializedError, match=r"column\.weight \(nothing wrote it\)"):
            shardinit.init_model_(model, SEED, device="cpu")

        # A version that keeps something elsewhere, or means something else by it.
        model = Layers(numbered)
        weight = model.column.weight
        weight.partition_dim = 2
        with pytest.raises(ValueError, match=r"must fit the shape \(6, 8\), got 2 and 1.*megatron-core 0\.16"):
            locate(model)
        weight.partition_dim, weight.partition_stride = 0, 4
        with pytest.raises(ValueError, match=r"must fit the shape \(6, 8\), got 0 and 4"):
            locate(model)
        weight.partition_stride = 1
        group = model.column.tp_group
        del model.column.tp_group
        with pytest.raises(ValueError, match=r"must have tp_group, got one without"):
            locate(model)
        model.column.tp_group = group
        assert locate(model).pieces
    # Elsewhere Megatron is as it was.
    assert not hasattr(megatron_layers._initialize_affine_weight_cpu, "__wrapped__")
    assert not hasattr(megatron_layers._initialize_affine_weight_gpu, "__wrapped__")


# --- no master weight -----------------------------------------------------------------------------------------------


def _memory_worker(rank: int, world: int) -> tuple[int | None, int | None]:
    def build(rows: int) -> nn.Module:
        options = {"config": mw.config(), "init_method": normal}
        return nn.ModuleList([tensor_parallel.VocabParallelEmbedding(rows, 1024, **options)])

    def ours(rows: int) -> nn.Module:
        with shardinit.recording():
            model = build(rows)
        return shardinit.init_model_(model, SEED, device="cpu")

    with mw.parallel(2):
        ours(64)
        build(64)
        gc.collect()
        meters = InitMeter(), InitMeter()
        for meter, make in zip(meters, (ours, build), strict=True):
            with meter.around(nn.Module()):
                model = make(2**14)
            assert model[0].weight.shape == (2**13, 1024)
            del model
            gc.collect()
    return meters[0].extra_bytes, meters[1].extra_bytes


def test_there_is_no_master_weight() -> None:
    part = 2**25  # bytes of a rank's half
    for ours, stock in run_gloo(_memory_worker, 2, limit=100, threads=1):
        if ours is None or stock is None:
            pytest.skip("the peak of resident memory can't be reset here")
        assert ours < part + 4 * 2**20
        assert stock > 2 * part


# --- models ---------------------------------------------------------------------------------------------------------


def _gpt_worker(rank: int, world: int) -> None:
    for options in (
        {"tied": True},
        {"tied": False, "gated_linear_unit": True, "add_bias_linear": False, "num_query_groups": 4},
        {"tied": False, "normalization": "RMSNorm", "add_qkv_bias": True},
    ):
        truth: dict[str, torch.Tensor] = {}
        for tp in (1, 2, 4):
            with mw.parallel(tp):
                with shardinit.recording():
                    model = mw.gpt(**options)
                with local_init(model):
                    shardinit.init_model_(model, SEED, device="cpu")
                if tp == 1:
                    truth, expected = values_of(model), mw.losses(model)
                    digest = shardinit.fingerprint(model).digest
                assert_shards(model, truth, f"{options}, {tp}")
                assert shardinit.fingerprint(model).digest == digest
                # Megatron reads the parts as it reads the whole: gated halves and heads lie where it looks for them.
                found = mw.losses(model)
                assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6), (options, tp)
                found.sum().backward()
                assert all(one.grad is not None for one in model.parameters())
                stock = mw.gpt(**options)
                assert tp == 4 or not same_on_all_ranks(stock.embedding.position_embeddings.weight)


def _experts_worker(rank: int, world: int) -> None:
    options = {"tied": True, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}
    truth: dict[str, torch.Tensor] = {}
    expert = "decoder.layers.1.mlp.experts.local_experts.{}.linear_fc1.weight"
    for tp, ep in ((1, 1), (1, 4), (1, 2), (2, 1)):
        with mw.parallel(tp, ep):
            with shardinit.recording():
                model = mw.gpt(**options)
            with local_init(model):
                shardinit.init_model_(model, SEED, device="cpu")
            truth = truth or values_of(model)
            names = {name for piece in locate(model).pieces for name in piece.aliases}
            own = [number for number in range(4) if expert.format(number) in names]
            per_rank = 4 // ep
            first = mw.parallel_state.get_expert_model_parallel_rank() * per_rank
            assert own == list(range(first, first + per_rank)), (tp, ep)
            assert_shards(model, {name: truth[name] for name in names}, f"tensor {tp}, expert {ep}")
            assert len({values.numpy().tobytes() for name, values in truth.items() if ".linear_fc1.w" in name}) == 8
            # A Plan of the whole model serves every rank's part of it.
            plan = shardinit.record(model)
            for parameter in model.parameters():
                parameter.data.zero_()
            plan.apply_(model, SEED)
            assert_shards(model, {name: truth[name] for name in names}, f"tensor {tp}, expert {ep}, again")


def test_gpt_models_equal_those_of_one_process() -> None:
    run_gloo(_in_turn, 4, [_gpt_worker, _experts_worker], limit=200)
