"""Errors of an expert store are one sentence, are raised immediately, and leave no thread."""

import copy
import gc
import os
import random
import signal
import threading
import time
import weakref

import forkserver
import pytest
import torch
from stored import FFN, model_of, opened, source_of, write

from fairseq_tutel import ExpertStore
from fairseq_tutel.checkpoint.quantized import Quantized
from fairseq_tutel.inference.expert_cache import ExpertCache
from fairseq_tutel.inference.options import EVICTIONS
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.experts import build_experts
from fairseq_tutel.parallel.groups import Part

X_TD = torch.randn(9, FFN.model_dim, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def others():
    """Delete the stores that earlier tests left, and ignore the threads of stores that are still in use."""
    gc.collect()
    OTHERS[:] = []
    OTHERS[:] = threads()


OTHERS = []


def threads():
    of_stores = (thread for thread in threading.enumerate() if "experts" in thread.name)
    return [thread for thread in of_stores if thread not in OTHERS]


def run(model):
    with torch.no_grad():
        return model[1](model[0](X_TD)[0])[0]


def refusal(model):
    """Check that two runs of a model raise the same one-sentence error, and return the error text."""
    with pytest.raises(ValueError) as first:
        run(model)
    with pytest.raises(ValueError) as again:
        run(model)
    assert threads() == []
    assert str(again.value) == str(first.value)
    assert "\n" not in str(first.value) and str(first.value).endswith(".")
    return str(first.value)


def flipped(content):
    return content[:-1] + bytes([content[-1] ^ 1])


DAMAGES = {
    "missing": (lambda path: path.unlink(), "No such file"),
    "a FIFO": (lambda path: (path.unlink(), os.mkfifo(path)), "the path is not a regular file"),
    "short": (lambda content: content[:-9], "it is truncated"),
    "cut in its header": (lambda content: content[:99], "its header is truncated"),
    "no header": (lambda _: b"\x01" + b"\0" * 7 + b"[" * 99, "no valid safetensors header"),
    "a flipped bit": (flipped, "is not what was saved"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_store_errors_name_a_damaged_file(tmp_path, damage):
    store = ExpertStore()
    model = opened(FFN, store, source_of(write(model_of(FFN), tmp_path)))
    change, reason = DAMAGES[damage]
    for path in tmp_path.rglob("*.safetensors"):
        if damage in ("missing", "a FIFO"):
            change(path)
        else:
            path.write_bytes(change(path.read_bytes()))
            os.utime(path, (1, 1))
    message = refusal(model)
    assert "0.experts.experts-0000-0005.safetensors, which is corrupt or missing (" in message
    assert reason in message


def test_store_errors_name_a_file_that_changes_during_use(tmp_path):
    with ExpertStore() as store:
        model = opened(FFN, store, source_of(write(model_of(FFN), tmp_path)))
        run(model)
        for path in tmp_path.rglob("*.safetensors"):
            os.utime(path, (1, 1))
        assert "(it was changed while it was in use)" in refusal(model)


def test_an_error_in_the_thread_of_a_store_is_raised_at_the_next_use_of_the_store(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(5, "Input/output error")

    store = ExpertStore("pregated")
    model = opened(FFN, store, source_of(write(model_of(FFN), tmp_path)))
    run(model)
    monkeypatch.setattr(os, "preadv", fail)
    third = model[2].experts
    third.weights.prefetch(third, Groups.of_tensor(torch.tensor([0, 0, 1, 0, 0, 0])))
    for thread in threads():
        thread.join(60)
    assert "is corrupt or missing (Input/output error)" in refusal(model)


def wait_for_ever(folder, pipe):
    """Wait in another process for an expert whose fetch never completes, and send how the wait ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A background job of a shell ignores SIGINT.
    store = ExpertStore()
    model = opened(FFN, store, source_of(folder))

    def read(*arguments):
        pipe.send("waits")
        pipe.poll(60)  # Wait until the parent has sent SIGINT.
        time.sleep(0.5)
        return 0

    os.preadv = read
    try:
        run(model)
    except KeyboardInterrupt:
        pipe.send(f"interrupted, {len(threads())} threads")


def test_ctrl_c_ends_a_wait_for_an_expert_and_the_store_thread(tmp_path):
    here, there = forkserver.context().Pipe()
    arguments = write(model_of(FFN), tmp_path), there
    process = forkserver.context().Process(target=wait_for_ever, args=arguments, daemon=True)
    process.start()
    try:
        assert here.poll(60) and here.recv() == "waits"
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        here.send("sent")
        assert here.poll(60) and here.recv() == "interrupted, 0 threads"
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()


def test_the_thread_of_a_store_ends_with_the_store(tmp_path):
    source = source_of(write(model_of(FFN), tmp_path))
    with ExpertStore() as store:
        model = opened(FFN, store, source)
        run(model)
        assert len(threads()) == 1
    assert threads() == []
    assert refusal(model).startswith("the expert store is closed; create another")
    forgotten = ExpertStore()
    model = opened(FFN, forgotten, source)
    run(model)
    del forgotten, model
    gc.collect()
    assert threads() == []


def test_a_store_dequantizes_one_expert_at_a_time(tmp_path, monkeypatch):
    dequantize, there, counts = Quantized.dequantize, [], []

    def watched(*arguments):
        tensor = dequantize(*arguments)
        there.append(weakref.ref(tensor))
        counts.append(sum(each() is not None for each in there))
        return tensor

    monkeypatch.setattr(Quantized, "dequantize", watched)
    with ExpertStore(compute="unpacked") as store:
        model = opened(FFN, store, source_of(write(model_of(FFN), tmp_path, "int8")))
        run(model)
    assert len(counts) >= 2 * 4 and max(counts) == 2  # An expert has two matrices.


def test_a_model_with_a_store_can_be_copied_but_not_saved_or_loaded_or_used_in_a_fork(tmp_path):
    with ExpertStore(tier="host") as store:
        model = opened(FFN, store, source_of(write(model_of(FFN), tmp_path)))
        assert torch.equal(run(copy.deepcopy(model)), run(model))
        assert torch.equal(run(model.double().float()), run(model_of(FFN)))
        for use in (model.state_dict, lambda: model.load_state_dict(model_of(FFN).state_dict())):
            with pytest.raises(ValueError, match="are in an expert store, so they cannot be saved"):
                use()
        child = os.fork()
        if child == 0:
            try:
                run(model)
            except ValueError as error:
                os._exit(7 if "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_training_with_an_expert_store_raises_an_error():
    with ExpertStore(tier="host") as store:
        model = model_of(FFN)
        store.add(model[0].experts)
        for training, gradients in ((True, False), (False, True)):
            model.train(training)
            with torch.set_grad_enabled(gradients), pytest.raises(ValueError, match="evaluation"):
                model[0](X_TD)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "resident"}, "choose from on-demand, pregated, prefetch-all."),
        ({"cache": "3 cats"}, "give a number of experts, such as 64, a size with a unit, such as"),
        ({}, "not in shard files of a checkpoint; write the files with `fairseq-tutel convert"),
    ],
)
def test_invalid_store_arguments_raise_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        ExpertStore(**arguments).add(model_of(FFN)[0].experts)


def test_store_tensors_that_do_not_fit_the_layer_raise_an_error():
    experts = model_of(FFN)[0].experts
    tensors = {name: getattr(experts, name) for name in experts.names}
    store = ExpertStore(tier="host")
    with pytest.raises(ValueError, match=r"fc1_weight has shape \(4, 12, 8\), not \(6, 12, 8\)"):
        store.add(experts, {**tensors, "fc1_weight": tensors["fc1_weight"][:4]})
    with pytest.raises(ValueError, match="give --moe-expert-parallel-size 6 or less"):
        store.add(build_experts(FFN, Part(1, 0, 2, 0)), tensors)


@pytest.mark.parametrize("policy", EVICTIONS)
def test_the_expert_cache_evicts_the_same_experts_as_a_simple_oracle(policy):
    draw = random.Random(1)
    cache, kept, uses, used = ExpertCache(policy, None, 3), [], {}, {}
    for now in range(300):
        key = 0, min(draw.randrange(8), draw.randrange(8))
        if key in kept:
            kept.remove(key)
        cache.take(key)
        cache.note_use(key)
        uses[key], used[key] = uses.get(key, 0) + 1, now
        kept.append(key)
        rank = {"lfu": lambda k: (uses[k], used[k]), "lru": used.get}[policy]
        leaving = [min(kept, key=rank)] if len(kept) > 3 else []
        kept = [each for each in kept if each not in leaving]
        assert list(cache.put(key, 1)) == leaving
