# SPDX-License-Identifier: Apache-2.0
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/spillway)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/spillwayConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/spillwayConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
set(arch_independent ARCH_INDEPENDENT)
if(SPILLWAY_BUILD_COMPILED)
  set(arch_independent)
endif()
write_basic_package_version_file(${PROJECT_BINARY_DIR}/spillwayConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion ${arch_independent})
install(
  TARGETS spillway
  EXPORT spillwayTargets
  FILE_SET HEADERS
  FILE_SET doctest_headers
  FILE_SET cccl_headers
  FILE_SET io_uring_headers
  FILE_SET cufile_headers
  FILE_SET json_headers
  FILE_SET torch_headers
  FILE_SET tensorflow_headers)
# Installs only the headers. The target spillway::cuda is created by the package in the project that uses it, so
# that it does not matter whether the library was installed on a machine with a toolkit.
install(TARGETS spillway_cuda FILE_SET cuda_headers FILE_SET nvcc_headers FILE_SET nvcomp_headers)
install(EXPORT spillwayTargets NAMESPACE spillway:: DESTINATION ${package_dir})
if(SPILLWAY_BUILD_COMPILED)
  install(TARGETS spillway_compiled EXPORT spillwayCompiledTargets)
  install(EXPORT spillwayCompiledTargets NAMESPACE spillway:: DESTINATION ${package_dir})
endif()
install(FILES ${PROJECT_BINARY_DIR}/spillwayConfig.cmake ${CMAKE_CURRENT_LIST_DIR}/SpillwayFileTier.cmake
              ${CMAKE_CURRENT_LIST_DIR}/SpillwayCudaUse.cmake
              ${PROJECT_BINARY_DIR}/spillwayConfigVersion.cmake DESTINATION ${package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
