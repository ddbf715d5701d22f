# SPDX-License-Identifier: Apache-2.0
# Builds the first example as a program of another project, which takes the library in by WAY, and runs
# it. Works in the empty folder WORK_DIR.

set(program ${SOURCE_DIR}/examples/01_hello_swap/main.cpp)
file(REMOVE_RECURSE ${WORK_DIR})
file(MAKE_DIRECTORY ${WORK_DIR})

macro(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endmacro()

if(WAY STREQUAL "include_path")
  run(${CXX} -std=c++20 -I ${SOURCE_DIR}/include ${program} -pthread -o ${WORK_DIR}/consumer)
  run(${WORK_DIR}/consumer)
  return()
endif()

if(WAY STREQUAL "find_package")
  run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/prefix)
  set(how -DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix)
else()
  set(how -DSPILLWAY_SOURCE_DIR=${SOURCE_DIR} -DSPILLWAY_CUDA=${CUDA})
endif()
run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/consumer -B ${WORK_DIR}/build -G ${GENERATOR}
    -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_BUILD_TYPE=Debug -DPROGRAM=${program} ${how})
run(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
run(${WORK_DIR}/build/consumer)
