# SPDX-License-Identifier: Apache-2.0
"""Conan 2 recipe for the source tree that contains this file: conan create packaging/conan"""
import pathlib
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy


class Spillway(ConanFile):
    name = "spillway"
    description = "Swappable tensor containers for CUDA: swap to host memory, compact device memory"
    license = "Apache-2.0"
    topics = "cuda", "gpu-memory", "swapping", "defragmentation", "header-only"
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    no_copy_source = True

    @property
    def _tree(self):
        return pathlib.Path(self.recipe_folder).parents[1]

    def set_version(self):
        project = (self._tree / "CMakeLists.txt").read_text()
        self.version = re.search(r"^project\(.*?VERSION ([\d.]+)", project, re.MULTILINE | re.DOTALL).group(1)

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "src/*"):
            copy(self, pattern, self._tree, self.export_sources_folder)

    def layout(self):
        cmake_layout(self)

    def validate(self):
        check_min_cppstd(self, 20)

    def package_id(self):
        self.info.clear()  # only headers: one package for every compiler

    def generate(self):
        toolchain = CMakeToolchain(self)
        for part in ("CUDA", "BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_BENCHMARKS"):
            toolchain.cache_variables[f"SPILLWAY_{part}"] = "OFF"
        toolchain.generate()

    def build(self):
        CMake(self).configure()

    def package(self):
        CMake(self).install()

    def package_info(self):
        # CMake finds the package by the CMake files that it contains, since those have the component for CUDA.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/spillway"]
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        self.cpp_info.system_libs = ["pthread"]
