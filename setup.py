"""The one thing pyproject.toml cannot say: follow the `fairseq_tutel/kernels` link.

setuptools' declarative package search does not look behind symbolic links, `find_packages` does.
"""

from setuptools import find_packages, setup

setup(packages=find_packages(include=["fairseq_tutel*"]))
