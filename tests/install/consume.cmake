# SPDX-License-Identifier: Apache-2.0
# Builds and runs a program of another project, which uses the library in the way that WAY names. All files are
# written to the folder WORK_DIR, which is emptied first.

set(program ${SOURCE_DIR}/examples/01_hello_swap/main.cpp)
set(target spillway::spillway)
set(components)
set(refusal)  # the error that CMake must report, if it must fail
file(REMOVE_RECURSE ${WORK_DIR})
file(MAKE_DIRECTORY ${WORK_DIR})

macro(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endmacro()

# Configures the project with the given options and nothing to build, and installs the package.
macro(install_with)
  run(${CMAKE_COMMAND} -S ${SOURCE_DIR} -B ${WORK_DIR}/spillway -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX}
      -DSPILLWAY_BUILD_TESTS=OFF -DSPILLWAY_BUILD_EXAMPLES=OFF -DSPILLWAY_BUILD_BENCHMARKS=OFF ${ARGN})
  run(${CMAKE_COMMAND} --install ${WORK_DIR}/spillway --prefix ${WORK_DIR}/prefix)
endmacro()

set(how -DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix)
if(WAY STREQUAL "include_path")
  run(${CXX} -std=c++20 -I ${SOURCE_DIR}/include ${program} -pthread -o ${WORK_DIR}/consumer)
  run(${WORK_DIR}/consumer)
  return()
elseif(WAY STREQUAL "single_header")
  # The single header gets the name that the program includes. No other header is in the include path.
  foreach(time IN ITEMS first second)
    execute_process(COMMAND ${PYTHON} ${SOURCE_DIR}/scripts/single-header.py OUTPUT_VARIABLE ${time}
                    COMMAND_ERROR_IS_FATAL ANY)
  endforeach()
  if(NOT first STREQUAL second)
    message(FATAL_ERROR "scripts/single-header.py printed two different headers")
  endif()
  file(WRITE ${WORK_DIR}/single/spillway/sim.hpp "${first}")
  run(${CXX} -std=c++20 -I ${WORK_DIR}/single ${program} -pthread -o ${WORK_DIR}/consumer)
  run(${WORK_DIR}/consumer)
  return()
elseif(WAY STREQUAL "add_subdirectory")
  set(program ${SOURCE_DIR}/tests/install/consumer/plain.cpp)  # a small one; find_package builds a larger one
  set(target ${target}${OPTIONAL})
  set(how -DSPILLWAY_SOURCE_DIR=${SOURCE_DIR} -DSPILLWAY_CUDA=${CUDA})
elseif(WAY STREQUAL "wrong_option")
  set(how -DSPILLWAY_SOURCE_DIR=${SOURCE_DIR} -DSPILLWAY_CUDA=auto)
  set(refusal "SPILLWAY_CUDA is 'auto': choose AUTO, ON or OFF")
elseif(WAY MATCHES "^(fetch_content|cpm)$")
  # The address does not exist: both must use this source tree instead of a download.
  set(how -DSPILLWAY_ADDRESS=https://spillway.invalid -DCPM_FILE=${CPM_FILE} -DSPILLWAY_CUDA=${CUDA}
          -DFETCHCONTENT_SOURCE_DIR_SPILLWAY=${SOURCE_DIR} -DCPM_spillway_SOURCE=${SOURCE_DIR})
elseif(WAY STREQUAL "find_package")
  run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/prefix)
  file(GLOB_RECURSE licence ${WORK_DIR}/prefix/LICENSE)
  if(NOT licence)
    message(FATAL_ERROR "the LICENSE was not installed")
  endif()
elseif(WAY STREQUAL "compiled_component")
  run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/prefix)
  set(components compiled)
  set(target spillway::compiled)
elseif(WAY STREQUAL "cuda_component_of_plain_install")
  install_with(-DSPILLWAY_CUDA=OFF)
  set(components cuda)
  set(target spillway::cuda)
  set(program ${SOURCE_DIR}/tests/install/consumer/on_cuda.cpp)
  list(APPEND how -DCUDAToolkit_ROOT=${CUDA_ROOT})
elseif(WAY STREQUAL "cuda_sources")
  install_with(-DSPILLWAY_CUDA=OFF)
  set(components cuda)
  set(target spillway::cuda)
  set(program ${SOURCE_DIR}/tests/install/consumer/kernels.cu)
  list(APPEND how -DCUDAToolkit_ROOT=${CUDA_ROOT} -DCMAKE_CUDA_COMPILER=${NVCC} -DCMAKE_CUDA_ARCHITECTURES=90)
elseif(WAY STREQUAL "plain_use_of_cuda_install")
  install_with(-DSPILLWAY_CUDA=ON -DCUDAToolkit_ROOT=${CUDA_ROOT})
  set(program ${SOURCE_DIR}/tests/install/consumer/plain.cpp)
elseif(WAY STREQUAL "unknown_component")
  install_with(-DSPILLWAY_CUDA=OFF)
  set(components opencl)
  set(refusal "There is no component opencl: they are spillway, cuda, io_uring, cufile, checksums, zstd, lz4, nvcomp and compiled")
elseif(WAY STREQUAL "missing_component")
  install_with(-DSPILLWAY_CUDA=OFF)
  set(components compiled)
  set(refusal "install it with SPILLWAY_BUILD_COMPILED=ON")
endif()

set(configure
    ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/consumer -B ${WORK_DIR}/build -G ${GENERATOR}
    -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_BUILD_TYPE=None -DPROGRAM=${program} -DTARGET=${target}
    -DCOMPONENTS=${components} -DWAY=${WAY} ${how})
if(refusal)
  execute_process(COMMAND ${configure} RESULT_VARIABLE status ERROR_VARIABLE message)
  string(REGEX REPLACE "[ \n]+" " " message "${message}")
  if(status EQUAL 0 OR NOT message MATCHES "${refusal}")
    message(FATAL_ERROR "CMake should have failed, saying '${refusal}', but said: ${message}")
  endif()
  return()
endif()
run(${configure})
if(WAY MATCHES "^(fetch_content|cpm)$")
  return()  # enough: apart from that the way is the same as add_subdirectory
endif()
run(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
run(${WORK_DIR}/build/consumer)
