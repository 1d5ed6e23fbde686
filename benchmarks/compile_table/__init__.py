"""What every Triton kernel needs on GPUs that are not here: registers, spills, shared memory.

python -m benchmarks.compile_table                          all kernels for all targets, about a minute
python -m benchmarks.compile_table --target sm_90 --only ffn_up
python -m benchmarks.compile_table --markdown benchmarks/results/compiled.md
"""
