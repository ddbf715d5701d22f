# SPDX-License-Identifier: Apache-2.0
# Sets SPILLWAY_HAS_CUDA according to the option SPILLWAY_CUDA and whether the toolkit is found.
#
# The library needs only the toolkit's headers and runtime. Our own .cu sources also need the compiler,
# nvcc, so it is looked for separately: SPILLWAY_HAS_NVCC says whether it was found.

set(SPILLWAY_HAS_CUDA FALSE)
set(SPILLWAY_HAS_NVCC FALSE)
set(SPILLWAY_CUDA_MINIMUM 12.4)
if(SPILLWAY_CUDA STREQUAL "AUTO")
  find_package(CUDAToolkit ${SPILLWAY_CUDA_MINIMUM} QUIET)
  set(SPILLWAY_HAS_CUDA ${CUDAToolkit_FOUND})
elseif(SPILLWAY_CUDA)
  find_package(CUDAToolkit ${SPILLWAY_CUDA_MINIMUM} REQUIRED)
  set(SPILLWAY_HAS_CUDA TRUE)
endif()

macro(spillway_enable_cuda_language)
  if(SPILLWAY_HAS_CUDA)
    include(CheckLanguage)
    if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND CUDAToolkit_NVCC_EXECUTABLE)
      set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})  # the toolkit need not be in PATH
    endif()
    set(CMAKE_CUDA_ARCHITECTURES ${SPILLWAY_CUDA_ARCHITECTURES})
    set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)  # as CUDA::cudart is, so that a process has one runtime
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      enable_language(CUDA)
      if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25.1 has no C++20 option for nvcc
        set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
        set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
      endif()
      set(CMAKE_CUDA_STANDARD 20)
      set(CMAKE_CUDA_STANDARD_REQUIRED ON)
      set(SPILLWAY_HAS_NVCC TRUE)
    elseif(NOT SPILLWAY_CUDA STREQUAL "AUTO")
      message(FATAL_ERROR "SPILLWAY_CUDA is ON, but no nvcc was found for our own programs")
    endif()
  endif()
endmacro()
