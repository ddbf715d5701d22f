# SPDX-License-Identifier: Apache-2.0
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/spillway)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/spillwayConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/spillwayConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/spillwayConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(
  TARGETS spillway
  EXPORT spillwayTargets
  FILE_SET HEADERS
  FILE_SET doctest_headers
  FILE_SET cuda_headers
  FILE_SET cccl_headers
  FILE_SET json_headers
  FILE_SET torch_headers
  FILE_SET tensorflow_headers)
install(EXPORT spillwayTargets NAMESPACE spillway:: DESTINATION ${package_dir})
install(FILES ${PROJECT_BINARY_DIR}/spillwayConfig.cmake
              ${PROJECT_BINARY_DIR}/spillwayConfigVersion.cmake DESTINATION ${package_dir})
