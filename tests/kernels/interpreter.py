"""A process in which Triton interprets its kernels on the CPU.

Triton decides at import whether it interprets, so the process of the other tests cannot do both.
"""

import os
import warnings


def interpret(_: int = 0) -> None:
    """Set up the process: before Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("ignore")
    redirect_once()


def interpret_with_gpu(_: int = 0) -> None:
    """Set up the process, in which `python_gpu.gpu` can be used."""
    interpret()
    import python_gpu

    python_gpu.register()  # before autograd starts its threads


def redirect_once() -> None:
    """Let a function that a kernel calls leave triton.language as the kernel's launch redirected it.

    Triton looks through the whole module at every such call, two fifths of its time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # another Triton is slower
        return
    redirect = interpreter._patch_lang

    def patch_lang(fn):
        used = [each for each in fn.__globals__.values() if each is tl or each is tl.core]
        if any(tl.core.is_builtin(each.load) for each in used):
            return redirect(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang
