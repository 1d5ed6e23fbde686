"""Properties of the GPU kernels that can be found without a GPU: instructions, launches, bytes.

python -m benchmarks.static --json benchmarks/results/static.json       all targets and layers
python -m benchmarks.static --targets sm_90 --only grouped_weight_grad
"""
