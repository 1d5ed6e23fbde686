"""Window attention of Swin V2 equals a loop over all pairs of tokens."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from compare import same_function
from torch import nn
from torch.func import functional_call

from fairseq_tutel.vision.attention import WindowAttention, _offsets, windows_of
from fairseq_tutel.vision.options import SwinConfig
from fairseq_tutel.vision.swin_v2 import Block, PatchEmbedding, PatchMerging, SwinV2

CPU = torch.device("cpu")
TINY = SwinConfig(form="v2", patch_size=2, embed_dim=4, depths="2,1", heads="2,1", window=3, drop_path=0.0)


def drawn(module, seed=0):
    """Set all parameters of a module to random numbers, because some norm weights are initially 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.double().parameters():
        draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(draw * 0.3)
    return module


def window_and_region(i, side, window, shifted):
    """Return the window of a row or column, and whether the row or column was shifted over an edge."""
    if side <= window:
        return 0, 0
    shift = window // 2 if shifted else 0
    whole = math.ceil(side / window) * window
    return (i - shift) % whole // window, i < shift


def attention_by_pairs(attn, x, window, shifted):
    """Compute attention for an image [height, width, D] in a loop over queries."""
    H, W, D = x.shape
    heads, dim = attn.heads, D // attn.heads
    tokens = [(i, j) for i in range(H) for j in range(W)]
    place = {
        (i, j): (window_and_region(i, H, window, shifted), window_and_region(j, W, window, shifted))
        for i, j in tokens
    }
    spans = [min(side, window) - 1 or 1 for side in (H, W)]

    @cache
    def bias(*offset):
        offset = torch.tensor([n / span * 8 for n, span in zip(offset, spans, strict=True)])
        offset = (offset.sign() * torch.log2(offset.abs() + 1) / 3).double()
        of_heads = attn.cpb_mlp[2](attn.cpb_mlp[1](attn.cpb_mlp[0](offset)))
        return 16 * of_heads.sigmoid() if attn.by_cosine else of_heads

    @cache
    def part(token, n):
        projected = attn.qkv.weight[n * D : (n + 1) * D] @ x[token]
        if not attn.by_cosine:
            projected = projected + attn.qkv.bias[n * D : (n + 1) * D]
        elif n != 1:
            projected = projected + (attn.q_bias if n == 0 else attn.v_bias)
        return projected.view(heads, dim)

    def score(query, key):
        q, k = part(query, 0), part(key, 1)
        here = bias(query[0] - key[0], query[1] - key[1])
        if not attn.by_cosine:
            return (q * k).sum(1) / math.sqrt(dim) + here
        cosine = (q * k).sum(1) / (q.norm(dim=1) * k.norm(dim=1))
        return cosine * attn.logit_scale.view(-1).clamp(max=math.log(100)).exp() + here

    rows = []
    for query in tokens:
        keys = [key for key in tokens if place[key] == place[query]]
        weights = torch.stack([score(query, key) for key in keys]).softmax(0)
        values = torch.stack([part(key, 2) for key in keys])
        rows.append(attn.proj((weights.unsqueeze(2) * values).sum(0).flatten()))
    return torch.stack(rows)


@pytest.mark.parametrize("form", ["v2", "moe"])
@pytest.mark.parametrize(
    ("size", "window", "shifted"),
    [((4, 4), 2, True), ((4, 4), 4, True), ((5, 7), 3, False), ((5, 7), 3, True), ((2, 5), 4, True)],
)
def test_window_attention_equals_a_loop_over_all_pairs_of_tokens_in_a_window(form, size, window, shifted):
    attn = drawn(WindowAttention(8, 2, form))
    if form == "v2":
        # Attention clamps logit scales to log(100), which is about 4.6.
        attn.logit_scale.data.copy_(torch.tensor([1.0, 7.0]).view(2, 1, 1))
    x = torch.randn(1, *size, 8, dtype=torch.float64, requires_grad=True)
    windows = windows_of(*size, window, shifted, CPU)
    same_function(
        lambda: windows.merge(attn(windows.split(x.flatten(1, 2)), windows))[0],
        lambda: attention_by_pairs(attn, x[0], window, shifted),
        {"x": x, **dict(attn.named_parameters())},
    )


def test_position_biases_keep_the_scale_of_the_pretraining_window():
    attn, larger = (drawn(WindowAttention(8, 2, "v2", position_window=w)) for w in (0, 4))
    small, large = attn.cpb_mlp((4, 4)), larger.cpb_mlp((7, 7)).view(2, 7, 7, 7, 7)
    torch.testing.assert_close(large[:, :4, :4, :4, :4].reshape(2, 16, 16), small)


def test_patch_embedding_and_patch_merging_pad_edges_with_zeros():
    embedding, images = drawn(PatchEmbedding(1, 4, 3)), torch.randn(2, 1, 4, 5).double()
    whole = F.pad(images, (0, 1, 0, 2))
    x, size = embedding(images)
    assert size == (2, 2)
    assert torch.equal(x, embedding(whole)[0])
    merging = PatchMerging(1, "moe")
    merging.norm = merging.reduction = nn.Identity()
    merged, size = merging(torch.arange(1.0, 10).view(1, 9, 1), (3, 3))
    assert size == (2, 2)
    assert merged[0].tolist() == [[1, 4, 2, 5], [3, 6, 0, 0], [7, 0, 8, 0], [9, 0, 0, 0]]


@pytest.mark.parametrize("form", ["v2", "moe"])
def test_gradients_of_swin_v2_equal_finite_differences(form):
    model = drawn(SwinV2(replace(TINY, form=form), 1, 3))
    images = torch.randn(2, 1, 9, 7, dtype=torch.float64, requires_grad=True)
    names, values = zip(*model.named_parameters(), strict=True)
    assert torch.autograd.gradcheck(
        lambda x, *tensors: functional_call(model, dict(zip(names, tensors, strict=True)), (x,)),
        (images, *values),
        fast_mode=True,
    )


def test_drop_path_rates_rise_with_depth_and_keep_the_mean_output():
    model = SwinV2(replace(TINY, depths="3,2", drop_path=0.4), 1, 3)
    rates = [block.drop_path for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    block, x = Block(4, 2, TINY, 0.3, 0), torch.ones(4000, 1, 1)
    torch.manual_seed(1)
    dropped = block._added(x, 2 * x)
    assert dropped.unique().tolist() == pytest.approx([1, 1 + 2 / 0.7])
    assert dropped.mean().item() == pytest.approx(3, abs=0.08)
    assert torch.equal(block.eval()._added(x, 2 * x), 3 * x)


def test_swin_tensors_cached_in_inference_mode_can_be_used_in_training():
    windows_of.cache_clear(), _offsets.cache_clear()
    with torch.inference_mode():
        windows, offsets = windows_of(3, 5, 2, True, CPU), _offsets(2, 3, 0, CPU)
    assert not any(tensor.is_inference() for tensor in (windows.mask_G1NN, *offsets))
