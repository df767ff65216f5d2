"""A Plan as JSON: it comes back equal and gives the same bits, and a text that is not as it must be says where."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from recorded_models import Decoder, LowRank, StateSpace, Tables, Zoo

import torch_shardinit as shardinit
from torch_shardinit.plan import Entry, Plan
from torch_shardinit.plan_operators import operator
from torch_shardinit.program import Exact, Played, Step, Unwritten
from torch_shardinit.stream import STREAM_VERSION


def plan_of(make: Callable[[], nn.Module]) -> Plan:
    with shardinit.recording():
        model = make()
    return shardinit.record(model)


def normalised() -> nn.Module:
    parametrized = torch.nn.utils.parametrizations
    return nn.Sequential(parametrized.weight_norm(nn.Linear(4, 6)), parametrized.spectral_norm(nn.Linear(6, 3)))


def copied() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)


class InitFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(5, 4)
        nn.init.orthogonal_(self.rnn.weight_hh_l0, 1.5)
        for gate in self.rnn.weight_ih_l0.data.chunk(4):
            nn.init.orthogonal_(gate)
        self.sparse, self.eye, self.dirac = nn.Linear(7, 3), nn.Linear(4, 5), nn.Conv2d(4, 6, 3)
        nn.init.sparse_(self.sparse.weight, 0.3)
        nn.init.eye_(self.eye.weight)
        nn.init.dirac_(self.dirac.weight, 2)
        self.register_buffer("captured", torch.tensor([[1.5, -2.0], [0.0, float("inf")]]).t())
        self.register_buffer("from_numpy", torch.from_numpy(np.arange(6)).clone() * 2)
        self.register_buffer("complex", torch.polar(torch.ones(3), torch.arange(3.0)) * (1 + 2j))
        self.register_buffer("never", torch.empty(3))
        self.register_buffer("flags", torch.triu(torch.ones(4, 4, dtype=torch.bool), 1), persistent=False)


MODELS = (Decoder, Zoo, Tables, StateSpace, LowRank, InitFunctions, normalised, copied)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_plan_comes_back_equal_and_gives_the_same_bits(make: Callable[[], nn.Module]) -> None:
    plan = plan_of(make)
    text = plan.to_json()
    back = Plan.from_json(text)
    assert back == plan and plan == back and plan.diff(back) == [] and back.to_json() == text
    assert Plan.from_json(text.encode()) == plan and str(back) == str(plan)
    num_played = 0
    for name, entry in plan.entries.items():
        if isinstance(entry.program, Unwritten):
            continue
        num_played += isinstance(entry.program, Played)
        one, other = (torch.empty(entry.shape, dtype=entry.dtype) for _ in range(2))
        plan.fill_(name, one, seed=5)
        back.fill_(name, other, seed=5)
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), name
    assert num_played or make in (copied, LowRank)


@pytest.mark.parametrize("make", [Zoo, InitFunctions], ids=lambda make: make.__name__)
def test_a_plan_can_be_pickled_and_copied(make: Callable[[], nn.Module]) -> None:
    plan = plan_of(make)
    assert pickle.loads(pickle.dumps(plan)) == plan == copy.deepcopy(plan)


def test_the_text_is_readable() -> None:
    plan = plan_of(lambda: nn.Embedding(3, 2, padding_idx=1))
    tensor = (
        '{"name": "weight", "aliases": ["weight"], "kind": "parameter", "shape": [3, 2], "dtype": "float32", '
        '"persistent": true, "kept": false, "program": {"class": "exact", "drawn_as": null, "steps": '
        '[{"op": "normal", "args": [1.0, 0.0], "region": null}, '
        '{"op": "fill", "args": [0.0], "region": [[1, 1, 1], [0, 1, 2]]}]}}'
    )
    head = (
        f'{{"format": "torch_shardinit.plan", "format_version": 1, "stream_version": {STREAM_VERSION}, "tensors": [\n'
    )
    assert plan.to_json() == f"{head}{tensor}\n]}}\n"


def test_numbers_that_json_lacks() -> None:
    odd = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    values = (math.inf, -math.inf, math.nan, odd, -0.0, 0.1, 5e-324, 1.7976931348623157e308)
    entries = [
        Entry(f"{i}", (f"{i}",), "buffer", (2,), torch.float64, Exact((Step("fill", (value,)),)))
        for i, value in enumerate(values)
    ]
    back = Plan.from_json(Plan(entries).to_json())
    assert back == Plan(entries)
    got = [struct.pack(">d", back.entries[f"{i}"].program.steps[0].args[0]) for i in range(len(values))]
    assert got == [struct.pack(">d", value) for value in values]
    assert Plan(entries) != Plan([*entries[:4], Entry("4", ("4",), "buffer", (2,), torch.float64, entries[5].program)])


def test_arguments_are_told_apart() -> None:
    """1, 1.0 and True are equal in Python, but other arguments."""

    def table(value: Any) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            model = nn.Module()
            model.register_buffer("t", torch.arange(4).mul(value).add(torch.arange(4)))
            return model

        return make

    plans = [plan_of(table(value)) for value in (1, 1.0, True, 0.0, -0.0)]
    assert all((a == b) == (a is b) for a in plans for b in plans)
    for plan in plans:
        assert Plan.from_json(plan.to_json()) == plan


def test_error_a_large_captured_constant() -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.register_buffer("table", torch.from_numpy(np.random.default_rng(0).random(20_000)).clone())
        model.register_buffer("computed", torch.arange(20_000.0).sin())
        return model

    plan = plan_of(make)
    with pytest.raises(ValueError, match=r"to_json: table: a constant .* at most 65536 bytes .*, got 160000: .*comput"):
        plan.to_json()
    text = plan.to_json(max_constant_bytes=160_000)
    assert Plan.from_json(text) == plan
    assert len(text) < 160_000 * 4 / 3 + 4000, "what was computed takes no room"


def test_error_an_operator_that_needs_values() -> None:
    def make() -> nn.Module:
        model = nn.Module()
        found = torch.arange(4, device="cpu").nonzero()
        model.register_buffer("found", found + 1)
        return model

    with pytest.raises(
        ValueError, match=r"to_json: found: operation \d+: aten::nonzero must take its arguments on meta"
    ):
        plan_of(make).to_json()


def edited(path: str, value: Any, make: Callable[[], nn.Module] = InitFunctions) -> str:
    """The JSON of a model with one value replaced: path is a tensor's name, then keys and indices."""
    whole = json.loads(plan_of(make).to_json())
    name, *keys = path.split("/")
    place: Any = whole if not name else next(one for one in whole["tensors"] if one["name"] == name)
    *before, last = [int(key) if key.lstrip("-").isdigit() else key for key in keys]
    for key in before:
        place = place[key]
    if value is DELETE:
        del place[last]
    else:
        place[last] = value
    return json.dumps(whole)


DELETE = object()
NEVER = "captured/program"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("/format", "other", r"format: must be 'torch_shardinit.plan'"),
        ("/format_version", 2, r"format_version: must be 1, which this version knows, got 2"),
        ("/format_version", True, r"format_version: must be 1, .*got True"),
        ("/stream_version", STREAM_VERSION + 1, r"stream_version: must be \d+, which this version knows, got \d+"),
        ("/stream_version", DELETE, r"stream_version: must be \d+, .*got None"),
        ("/tensors", {}, r"tensors: must be a list, got an object of 0"),
        ("/more", 1, r"the text: must have no 'more'"),
        ("eye.weight/name", 3, r"tensors\[\d+\]\.name: must be a string of at most 4096 characters, got 3"),
        ("eye.weight/name", "x", r"tensors\[\d+\]\.aliases: must be distinct, sorted, and begin with the name"),
        ("eye.weight/shape", [5, -4], r"tensors\[\d+\]\.shape\[1\]: must be an int in \[0, \d+\], got -4"),
        ("eye.weight/shape", [1 << 40, 1 << 40], r"shape: must hold fewer than 2\^63 elements"),
        ("eye.weight/shape", [10**30], r"shape\[0\]: must be an int in .*got a larger int"),
        ("eye.weight/dtype", "object", r"tensors\[\d+\]\.dtype: must be one of .*float32.*got 'object'"),
        ("eye.weight/dtype", "int64", r"program\.steps: exact steps must be for one of float64, .*got torch\.int64"),
        ("eye.weight/kind", "thing", r"kind: must be one of parameter, buffer, got 'thing'"),
        ("eye.weight/persistent", 1, r"persistent: must be true or false, got 1"),
        ("eye.weight/kept", True, r"kept: must be false for a tensor that a program writes"),
        ("eye.weight/program/class", "code", r"program\.class: must be one of exact, played, unwritten, got 'code'"),
        ("eye.weight/program/extra", 1, r"program: must have no 'extra'"),
        ("eye.weight/program/steps", DELETE, r"program: must have 'steps'"),
        ("eye.weight/program/steps", [], r"program\.steps: the steps must write every element"),
        ("eye.weight/program/drawn_as", 3, r"drawn_as: must be a string"),
        ("eye.weight/program/steps/0/op", "exec", r"steps\[0\]\.op: must be one of uniform, .*, got 'exec'"),
        ("eye.weight/program/steps/0/args", [1, 2, 3], r"steps\[0\]: Step: eye takes 2 arguments"),
        ("eye.weight/program/steps/0/args", [0, 2], r"steps\[0\]\.args: must be two dimensions of 2, got"),
        ("eye.weight/program/steps/0/args/0", "1", r"\.args\[0\]: must be a number, inf, -inf or nan, got '1'"),
        ("eye.weight/program/steps/0/args/0", 10**400, r"args\[0\]: must be a number, .*got a larger int"),
        ("eye.weight/program/steps/0/region", [[0, 1, 5]], r"region: must have a span for each of 2 dimensions, got 1"),
        ("eye.weight/program/steps/0/region", [[0, 1, 6], [0, 1, 4]], r"region\[0\]: must lie in a dimension of 5"),
        ("eye.weight/program/steps/0/region", [[0, 0, 1], [0, 1, 4]], r"region\[0\]: must lie in a dimension of 5"),
        ("captured/program/out", [0, 0, [2, 2], [1, 2]], r"program\.out: must be \[storage, offset, sizes, strides"),
        ("captured/program/out/0", 7, r"out: must be a view of one of the 1 storages, got number 7"),
        ("captured/program/out/1", 1, r"out: must lie in its storage of 16 bytes, got a view that ends at byte 20"),
        ("captured/program/out/3", [1 << 62, 1], r"out: must lie in its storage of 16 bytes"),
        ("captured/program/out/3", [-1, 1], r"out\[3\]\[0\]: must be an int in \[0"),
        ("captured/program/out/2", [2, 1], r"out: must have the tensor's shape and dtype, \[2, 2\]"),
        ("captured/program/num_bytes", [1 << 60], r"num_bytes: the storages must hold at most \d+ bytes, got 115292"),
        ("captured/program/num_bytes", [1] * 70_000, r"num_bytes: must be a list of at most 65536, got a list"),
        ("captured/program/num_bytes", [17], r"constants\['0'\]: must hold the 17 bytes of its storage, got 16"),
        ("captured/program/constants", {"0": "?" * 16}, r"constants\['0'\]: must be base64"),
        ("captured/program/constants", {"0": "A" * 10**6}, r"constants\['0'\]: must be a string of at most 24"),
        ("captured/program/constants", {"1": ""}, r"constants\['1'\]: must be the number of one of the 1 storages"),
        ("captured/program/constants", {"-1": ""}, r"constants\['-1'\]: must be the number of one"),
        ("from_numpy/program/ops/0/op", "aten::from_file", r"ops\[0\]\.op: must be an operator that a recording"),
        ("from_numpy/program/ops/0/args", [1, 2, 3, 4], r"ops\[0\]: aten::\w+[.\w]* must take its arguments on meta"),
        ("from_numpy/program/ops/0/args/0", {"pickle": "gASVAAAA"}, r"args\[0\]: must be a JSON value or an"),
        ("from_numpy/program/ops/0/default_dtype", "int64", r"default_dtype: must be one of float32, "),
        ("from_numpy/program/ops/0/kwargs", [], r"kwargs: must be an object, got a list of 0"),
        ("from_numpy/program/ops/0/fresh/0", [1], r"fresh\[0\]: must be \[which result, view\]"),
        ("from_numpy/program/ops/0/fresh/0/0", 3, r"ops\[0\]: aten::\w+[.\w]* must give result 3, got 1 results"),
        ("complex/program/ops/0/args", [{"device": "cuda:0"}], r"\.device: must be one of cpu, meta, got 'cuda:0'"),
        ("rnn.weight_hh_l0/program/ops/0/composite", "system", r"composite: must be one of orthogonal_, .*, got"),
        ("rnn.weight_hh_l0/program/ops/0/args", ["nan"], r"args: must be finite gain, got \[nan\]"),
        ("rnn.weight_hh_l0/program/ops/0/draw", -1, r"draw: must be an int in \[0"),
        ("rnn.weight_hh_l0/program/ops/0/region", [[0, 1, 1], [0, 1, 1]], r"view: must be the box region of its owner"),
        ("sparse.weight/program/ops/0/args", [1.5, 1], r"args\[0\]: must be in \[0, 1\], got 1\.5"),
        ("never/program/reason", "x" * 5000, r"reason: must be a string of at most 4096 characters"),
    ],
)  # fmt: skip
def test_error_names_the_place(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^Plan\.from_json: .*" + message):
        Plan.from_json(edited(path, value))


def test_error_an_operator_that_takes_memory() -> None:
    """What a program would take is found out on meta, before it takes any."""

    def make() -> nn.Module:
        model = nn.Module()
        model.register_buffer("t", torch.arange(4.0).exp())
        return model

    for value, message in [
        (
            [10**12],
            r"ops\[0\]: result 0 of aten::arange[.\w]* must be torch\.float32 of shape \[4\], as the program says",
        ),
        ([{"float": "inf"}], r"ops\[0\]: aten::arange[.\w]* must take its arguments on meta"),
    ]:
        whole = json.loads(edited("t/program/ops/0/args", value, make))
        assert whole["tensors"][0]["program"]["ops"][0]["op"].startswith("aten::arange")
        with pytest.raises(ValueError, match=message):
            Plan.from_json(json.dumps(whole))
    whole = json.loads(plan_of(make).to_json())
    program = whole["tensors"][0]["program"]
    # A wide view of four bytes, which the operator makes dense.
    program["ops"][1]["args"][0]["ref"][2:4] = [[1 << 40], [0]]
    with pytest.raises(ValueError, match=r"ops\[1\]: result 0 of aten::exp must be"):
        Plan.from_json(json.dumps(whole))
    program["ops"][1]["fresh"][0][1][2:4] = [[1 << 40], [0]]
    with pytest.raises(ValueError, match=r"ops\[1\]: result 0 of aten::exp must fit in 16 bytes, got 4398046511104"):
        Plan.from_json(json.dumps(whole))


def test_error_steps_that_cut_into_too_many_boxes() -> None:
    whole: list[list[int]] = [[0, 1, 100]] * 3
    steps: list[Any] = [{"op": "fill", "args": [0.0], "region": None}]
    for index in range(1, 99, 3):  # planes of a cube: what lies between them is as many boxes as a lattice has cells
        for dim in range(3):
            region = [*whole[:dim], [index, 1, 1], *whole[dim + 1 :]]
            steps.append({"op": "mul", "args": [2.0], "region": region})
    entry = {"name": "a", "aliases": ["a"], "kind": "buffer", "shape": [100] * 3, "dtype": "float32", "kept": False}
    entry |= {"persistent": True, "program": {"class": "exact", "drawn_as": None, "steps": steps}}
    head = {"format": "torch_shardinit.plan", "format_version": 1, "stream_version": STREAM_VERSION}
    with pytest.raises(
        ValueError, match=r"tensors\[0\]\.program\.steps: the steps must cut the tensor into at most 16384"
    ):
        Plan.from_json(json.dumps({**head, "tensors": [entry]}))
    entry["program"]["steps"] = steps[:19]  # type: ignore[index]
    assert Plan.from_json(json.dumps({**head, "tensors": [entry]})).lookup("a") is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Plan.from_json: Expecting value"),
        ("[]", "format: must be"),
        ('{"format": NaN}', "NaN is no JSON"),
        ('{"a": 1, "a": 2}', "keys must be distinct"),
        ("[" * 200_000, "nested too deeply"),
        (b"\xff\xfe\xfd", "Plan.from_json: "),
        ('{"format": ' + "9" * 10_000 + "}", "Plan.from_json: "),
        (" " * 1001, "the text must be at most 1000 bytes, got 1001"),
    ],
)  # fmt: skip
def test_error_a_text_that_is_no_plan(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text, max_bytes=1000 if isinstance(text, str) and not text.strip() and text else 1 << 26)
    with pytest.raises(TypeError, match="text must be str or bytes, got dict"):
        Plan.from_json({})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "label",
    [
        *("os::system", "aten", "aten::", "aten::__class__", "aten::add.__class__", "aten::add.Tensor.x", "prims::add"),
        *("aten::add.Tensor\n", "aten::add", "aten::from_file", "aten::set_.source_Storage", "aten::resize_"),
        *(
            "aten::normal_",
            "aten::bernoulli_.float",
            "aten::randperm",
            "aten::view",
            "aten::empty_like",
            "aten::as_strided",
            "aten::_print",
        ),
        *("aten::record_stream", "aten::_test_string_default", "aten::_local_scalar_dense", "aten::rename_", "init::x"),
        *("aten::linear", "aten::_sparse_coo_tensor_unsafe", "aten::max_pool2d_with_indices_backward"),
    ],
)
def test_error_operators_that_a_plan_must_not_name(label: str) -> None:
    with pytest.raises(
        ValueError, match=r"^must be (the schema name of an operator of torch\.ops\.aten|an operator that)"
    ):
        operator(label)


def test_random_edits_are_plans_or_value_errors() -> None:
    """Nothing else comes out of a text, whatever single value of it is another one."""
    text = plan_of(InitFunctions).to_json()
    chosen = random.Random(3)
    odd = [None, True, -1, 0, 1, 3, 1 << 62, 1 << 64, 0.5, "", "0", "inf", "aten::mul.Tensor", [], [0], {}, {"ref": []}]
    paths: list[list[Any]] = []

    def walk(value: Any, path: list[Any]) -> None:
        paths.append(path)
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            walk(inner, [*path, key])

    walk(json.loads(text), [])
    outcomes = {"plan": 0, "error": 0}
    for _ in range(700):
        whole = json.loads(text)
        path = chosen.choice(paths[1:])
        place = whole
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = chosen.choice(odd)
        try:
            Plan.from_json(json.dumps(whole))
            outcomes["plan"] += 1
        except ValueError as error:
            assert str(error).startswith("Plan.from_json: "), error
            outcomes["error"] += 1
    assert outcomes["error"] > 300 and outcomes["plan"] > 25, outcomes


def test_an_applied_text_fills_shards_like_the_model_that_was_recorded() -> None:
    with shardinit.recording():
        model = InitFunctions()
    text = shardinit.record(model).to_json()
    keep = ["never"]
    whole = shardinit.init_model_(model, 3, device="cpu", keep=keep)
    with shardinit.recording():
        other = InitFunctions()
    other.to_empty(device="cpu")
    Plan.from_json(text).apply_(other, 3, keep=keep)
    for (name, a), (_, b) in zip(whole.named_parameters(), other.named_parameters(), strict=True):
        assert_bitwise_equal(patterns(a), patterns(b), name)
