# SPDX-License-Identifier: Apache-2.0
# Sets SPILLWAY_HAS_CUDA from SPILLWAY_CUDA and what is found.
#
# The toolkit's headers and runtime are all that the library needs. The compiler, nvcc, is needed only
# by our own .cu sources, so it is looked for separately and SPILLWAY_HAS_NVCC says whether it is there.

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
    set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)  # as CUDA::cudart: one runtime in a process, not two
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      enable_language(CUDA)
      if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25.1 knows no CUDA20 for nvcc
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
