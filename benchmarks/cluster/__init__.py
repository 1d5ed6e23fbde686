"""An emulated cluster: network namespaces with limited links, and the MoE layer measured across them.

    python -m benchmarks.cluster --nodes 2 --local 2 --json out.json

Its limits: benchmarks/README.md.
"""
