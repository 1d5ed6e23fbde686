import math

import pytest
import torch

from fairseq_tutel.checkpoint.files import walk
from fairseq_tutel.checkpoint.malformed import refuse_malformed

NUMBER, WHOLE = "a number of at least 0", "a whole number of at least 0"
ITERATOR, UPDATES = "extra_state.train_iterator", "optimizer_history.-1.num_updates"


@pytest.mark.parametrize(
    ("state", "name", "expected"),
    [
        ({"extra_state": {"previous_training_time": "1"}}, "extra_state.previous_training_time", NUMBER),
        ({"extra_state": {"train_iterator": {"epoch": "two"}}}, f"{ITERATOR}.epoch", WHOLE),
        (
            {"extra_state": {"train_iterator": {"iterations_in_epoch": 3.5}}},
            f"{ITERATOR}.iterations_in_epoch",
            WHOLE,
        ),
        ({"optimizer_history": [{"num_updates": -1}]}, UPDATES, WHOLE),
        ({"optimizer_history": [{"num_updates": torch.tensor(10)}]}, UPDATES, WHOLE),
        (
            {"extra_state": {"metrics": {"train": [(0, "loss", "AverageMeter", {"val": "x"})]}}},
            "a metric's val",
            "a number",
        ),
        ({"extra_state": [1, 2]}, "extra_state", "a dictionary"),
        ({"extra_state": {"train_iterator": 5}}, ITERATOR, "a dictionary"),
        ({"last_optimizer_state": {"state": (1,)}}, "last_optimizer_state.state", "a dictionary"),
        ({"optimizer_history": [3]}, "optimizer_history.-1", "a dictionary"),
        ({"optimizer_history": {"num_updates": 3}}, "optimizer_history", "a list"),
        ({"last_optimizer_state": ({},)}, "last_optimizer_state", "a dictionary"),
        ({"task_state": math.inf}, "task_state", "a dictionary"),
        ({"model": ()}, "model", "a dictionary"),
        ({"cfg": [1]}, "cfg", "a dictionary"),
        ({"optimizer_history": [{"num_updates": 10**400}]}, UPDATES, WHOLE),
        (
            {"extra_state": {"previous_training_time": 10**400}},
            "extra_state.previous_training_time",
            NUMBER,
        ),
        ({"last_optimizer_state": {"state": {0: {"step": -1e30}}}}, "the optimizer's step", NUMBER),
        (
            {"last_optimizer_state": {"adam": {"state": {0: {"step": torch.tensor(math.nan)}}}}},
            "the optimizer's step",
            NUMBER,
        ),
    ],
)
def test_an_entry_of_another_type_is_refused_by_its_name(state, name, expected):
    with pytest.raises(ValueError, match=r"^x\.pt has .*; give another file\.$") as error:
        refuse_malformed(state, "x.pt")
    assert f" as {name}, which must be {expected}" in str(error.value)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (lambda: None, "None"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "dtype torch.qint8"),
        (lambda: torch.empty(2, device="meta"), "without data"),
        (lambda: torch.ones(2, dtype=torch.int32), "dtype torch.int32"),
        (lambda: torch.ones(2, dtype=torch.complex64), "dtype torch.complex64"),
        (lambda: torch.ones(2).to_sparse(), "a sparse or nested tensor"),
        (lambda: torch.zeros(1).expand(2**20, 2**24), "70,368,744,177,664 bytes that repeats"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_weight_that_no_model_can_load_is_refused(value, problem):
    with pytest.raises(ValueError, match=rf"^x\.pt has .*{problem}.* as the weight 'fc1\.weight'; give"):
        refuse_malformed({"model": {"fc1.weight": value()}}, "x.pt")


def test_a_file_that_holds_a_list_is_refused():
    with pytest.raises(ValueError, match=r"^x\.pt holds a list; give a fairseq checkpoint\.$"):
        refuse_malformed([1], "x.pt")


def test_experts_that_are_a_single_number_are_refused():
    with pytest.raises(ValueError, match=r"has a single number as the weight .fc1\.experts\.fc1_weight"):
        refuse_malformed({"model": {"fc1.experts.fc1_weight": torch.tensor(1.0)}}, "x.pt")


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"extra_state": {"metrics": {"train": [(0, "loss", "AverageMeter", {"val": 1, "round": None})]}}},
        {"extra_state": None, "last_optimizer_state": None, "optimizer_history": []},
        {"extra_state": {"previous_training_time": torch.tensor(0.2)}},
        {"last_optimizer_state": {"state": {0: {"step": 4}, 1: {"step": torch.tensor(4.0)}}}},
        {"last_optimizer_state": {"state": {}, "param_groups": [{"amsgrad": True, "betas": (0.9, 1)}]}},
        {"model": {"attn.bias": torch.ones(2, dtype=torch.bool)}},
        {"model": {"w": torch.ones(2), "layer._extra_state": torch.empty(0, device="meta")}},
    ],
)
def test_what_fairseq_saves_is_accepted(state):
    refuse_malformed(state, "x.pt")


def test_every_entry_is_visited_once_though_a_container_holds_itself():
    shared = {"c": 1}
    tree = {"a": [shared, (shared, 2)], "b": shared}
    tree["self"] = tree
    assert sorted((str(key), value) for _, key, value in walk(tree) if isinstance(value, int)) == [
        ("1", 2),
        ("c", 1),
    ]
    chain = []
    for _ in range(100_000):
        chain = [chain]
    assert sum(1 for _ in walk(chain)) == 100_000
