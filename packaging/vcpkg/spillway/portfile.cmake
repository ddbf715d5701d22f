# SPDX-License-Identifier: Apache-2.0
# vcpkg port for the source tree that contains this file: vcpkg install spillway --overlay-ports=packaging/vcpkg
set(VCPKG_BUILD_TYPE release)  # only headers, which are the same in a debug build
set(SOURCE_PATH "${CURRENT_PORT_DIR}/../../..")
vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS -DSPILLWAY_CUDA=OFF -DSPILLWAY_BUILD_TESTS=OFF -DSPILLWAY_BUILD_EXAMPLES=OFF
          -DSPILLWAY_BUILD_BENCHMARKS=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/spillway)
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/lib" "${CURRENT_PACKAGES_DIR}/share/doc")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
