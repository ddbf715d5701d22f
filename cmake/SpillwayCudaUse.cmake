# SPDX-License-Identifier: Apache-2.0
# spillway_use_cuda(<target>): adds the CUDA toolkit to an interface target. The toolkit must have been found before.
function(spillway_use_cuda target)
  target_link_libraries(${target} INTERFACE CUDA::cudart)
  target_compile_definitions(${target} INTERFACE SPILLWAY_WITH_CUDA=1)
  # CMake 3.25.1 has no C++20 option for nvcc, so the feature cxx_std_20 has no effect there.
  if(CMAKE_CUDA_COMPILER_ID STREQUAL "NVIDIA" AND NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    target_compile_options(${target} INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>)
  endif()
endfunction()
