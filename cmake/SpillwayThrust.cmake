# SPDX-License-Identifier: Apache-2.0
# Thrust for plain C++ compilers. If Thrust is found, adds the target spillway_thrust_cpp and sets
# SPILLWAY_HAS_THRUST. Algorithms run on the host, with Thrust's CPP backend.
#
# The toolkit's copy is preferred, since nvcc uses it for our .cu sources. It is also used with
# SPILLWAY_CUDA=OFF if a toolkit is installed, and then needs nothing else of the toolkit.
include_guard(GLOBAL)

set(SPILLWAY_HAS_THRUST FALSE)
set(spillway_toolkit_thrust)
if(SPILLWAY_HAS_CUDA)
  foreach(folder IN LISTS CUDAToolkit_INCLUDE_DIRS)
    list(APPEND spillway_toolkit_thrust ${folder}/cccl ${folder})
  endforeach()
endif()
find_path(SPILLWAY_THRUST_INCLUDE_DIR thrust/version.h HINTS ${spillway_toolkit_thrust})
if(NOT SPILLWAY_THRUST_INCLUDE_DIR)
  find_package(CUDAToolkit ${SPILLWAY_CUDA_MINIMUM} QUIET)
  foreach(folder IN LISTS CUDAToolkit_INCLUDE_DIRS)
    list(APPEND spillway_toolkit_thrust ${folder}/cccl ${folder})
  endforeach()
  find_path(SPILLWAY_THRUST_INCLUDE_DIR thrust/version.h HINTS ${spillway_toolkit_thrust})
endif()
mark_as_advanced(SPILLWAY_THRUST_INCLUDE_DIR)

if(SPILLWAY_THRUST_INCLUDE_DIR)
  set(SPILLWAY_HAS_THRUST TRUE)
  add_library(spillway_thrust_cpp INTERFACE)
  set(is_cxx $<COMPILE_LANGUAGE:CXX>)  # nvcc has its own copy and its own backend
  target_include_directories(spillway_thrust_cpp SYSTEM
    INTERFACE $<${is_cxx}:${SPILLWAY_THRUST_INCLUDE_DIR}>)
  target_compile_definitions(spillway_thrust_cpp
    INTERFACE $<${is_cxx}:THRUST_HOST_SYSTEM=THRUST_HOST_SYSTEM_CPP>
              $<${is_cxx}:THRUST_DEVICE_SYSTEM=THRUST_DEVICE_SYSTEM_CPP>)
  target_compile_features(spillway_thrust_cpp INTERFACE cxx_std_20)
endif()
