# SPDX-License-Identifier: Apache-2.0
# spillway::compiled is a library of code that is compiled once: classes that depend on no policies, and templates with
# the default policies of the simulated device and, with a toolkit, of CUDA. In programs that link it, the macro
# SPILLWAY_COMPILED declares these classes `extern template`. Our examples and benchmarks link it; it is installed if
# SPILLWAY_BUILD_COMPILED is ON.
if(NOT spillway_instantiates)
  if(SPILLWAY_BUILD_COMPILED)
    message(FATAL_ERROR "SPILLWAY_BUILD_COMPILED is ON, but this compiler, clang before 16, cannot compile it")
  endif()
  add_library(spillway_compiled INTERFACE)
  add_library(spillway::compiled ALIAS spillway_compiled)
  target_link_libraries(spillway_compiled INTERFACE spillway)
  return()
endif()
add_library(spillway_compiled STATIC ${PROJECT_SOURCE_DIR}/src/compiled_parts.cpp
                                     ${PROJECT_SOURCE_DIR}/src/compiled_sim.cpp)
add_library(spillway::compiled ALIAS spillway_compiled)
set_target_properties(spillway_compiled PROPERTIES EXPORT_NAME compiled POSITION_INDEPENDENT_CODE ON
                                                   CXX_EXTENSIONS OFF)
target_link_libraries(spillway_compiled PUBLIC spillway)
target_compile_definitions(spillway_compiled INTERFACE SPILLWAY_COMPILED=1)
spillway_compile_options(spillway_compiled)
if(SPILLWAY_HAS_CUDA)
  # A separate object file, so that the linker leaves it out of programs that do not use CUDA.
  target_sources(spillway_compiled PRIVATE ${PROJECT_SOURCE_DIR}/src/compiled_cuda.cpp)
  target_include_directories(spillway_compiled SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_definitions(spillway_compiled INTERFACE SPILLWAY_COMPILED_CUDA=1)
endif()
