"""The activation functions of `activations.py` with the same names, for use inside Triton kernels.

All functions and derivatives propagate NaN, so that a loss scaler detects the NaN.
"""

import triton
import triton.language as tl

# In products and sums, these constants stand to the right of the operator, because Triton's interpreter
# selects the operation by the type of the left operand.
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_PDF_0 = tl.constexpr(0.3989422804014327)  # The normal density at 0, 1 / sqrt(2 pi).
_TANH_GELU = tl.constexpr(0.7978845608028654)  # The factor sqrt(2 / pi) in the tanh approximation of GELU.
_CUBIC = tl.constexpr(0.044715)
# The Taylor series of tanh has the coefficients 1, -1 / 3, 2 / 15 and -17 / 315.
_TANH_3 = tl.constexpr(-0.3333333333333333)
_TANH_5 = tl.constexpr(0.13333333333333333)
_TANH_7 = tl.constexpr(-0.05396825396825397)


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent of x. Triton's interpreter does not have libdevice's tanh."""
    square = x * x
    near_0 = x * (1 + square * (square * (square * _TANH_7 + _TANH_5) + _TANH_3))
    # If x is far from 0, the subtraction does not lose precision.
    return tl.where(tl.abs(x) < 0.1, near_0, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit
def activate(h, ACTIVATION: tl.constexpr):
    """Apply an activation function to h in a Triton kernel. Both h and the result are fp32 or fp64."""
    if ACTIVATION == "relu":
        a = tl.where(h < 0, 0.0, h)
    elif ACTIVATION == "relu_squared":
        positive = tl.where(h < 0, 0.0, h)
        a = positive * positive
    elif ACTIVATION == "gelu":
        a = 0.5 * h * (1 + tl.erf(h * _SQRT_HALF))
    elif ACTIVATION == "gelu_fast" or ACTIVATION == "gelu_accurate":
        a = 0.5 * h * (1 + tanh(h * (1 + h * h * _CUBIC) * _TANH_GELU))
    elif ACTIVATION == "tanh":
        a = tanh(h)
    elif ACTIVATION == "swish":
        a = h * tl.sigmoid(h)
    else:
        tl.static_assert(ACTIVATION == "linear")
        a = h
    return a


@triton.jit
def activate_backward(da, kept, ACTIVATION: tl.constexpr):
    """Return the gradient of an activation's input. `kept` is the input or output that forward saved."""
    if ACTIVATION == "relu":
        dh = tl.where(kept <= 0, 0.0, da)
    elif ACTIVATION == "relu_squared":
        dh = 2 * da * tl.where(kept < 0, 0.0, kept)
    elif ACTIVATION == "gelu":
        below = 0.5 * (1 + tl.erf(kept * _SQRT_HALF))
        dh = da * (below + kept * _PDF_0 * tl.exp(-0.5 * kept * kept))
    elif ACTIVATION == "gelu_fast" or ACTIVATION == "gelu_accurate":
        square = kept * kept
        t = tanh(kept * (1 + square * _CUBIC) * _TANH_GELU)
        slope = (1 + 3 * square * _CUBIC) * _TANH_GELU
        dh = 0.5 * da * (1 + t + kept * (1 - t * t) * slope)
    elif ACTIVATION == "tanh":
        dh = da * (1 - kept * kept)
    elif ACTIVATION == "swish":
        s = tl.sigmoid(kept)
        dh = da * s * (1 + kept * (1 - s))
    else:
        tl.static_assert(ACTIVATION == "linear")
        dh = da
    return dh
