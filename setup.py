"""Builds the CPU kernels, where there is a C++ compiler; all else is in pyproject.toml.

Each source file is compiled for one instruction set; which of them runs is decided at run time.
"""

from __future__ import annotations

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("kernels/native")
COMMON = [
    *("-std=c++20", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-g0"),
    *("-Wno-psabi", "-Wno-ignored-attributes", "-Wno-maybe-uninitialized"),
]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512 += ["-mprefer-vector-width=512"]
BF16 = [*AVX512, "-mavx512bf16"]
LEVELS = {
    "avx2.cpp": AVX2,
    "avx512.cpp": AVX512,
    "avx512_bf16.cpp": BF16,
    "amx.cpp": [*BF16, "-mamx-tile", "-mamx-bf16"],
}
"""Files that only x86-64 has, and their flags."""


def sources() -> list[str]:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return [str(p) for p in sorted(SOURCES.glob("*.cpp")) if x86 or p.name not in LEVELS]


class BuildKernels(build_ext):
    def build_extension(self, ext: Extension) -> None:
        objects = []
        for source in ext.sources:
            objects += self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                extra_postargs=[*COMMON, *LEVELS.get(Path(source).name, [])],
                depends=ext.depends,
            )
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            extra_postargs=["-pthread"],
            target_lang="c++",
        )


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "pageferry.kernels._native",
            sources=sources(),
            depends=[str(p) for p in SOURCES.glob("*.h")],
            optional=True,
        )
    ],
)
