# SPDX-License-Identifier: Apache-2.0
# Functions for tests, examples and benchmarks. Nothing here changes the exported targets.

set(spillway_install_hint "scripts/install-dependencies.sh installs what is missing")

# Whether class templates can be instantiated once for all programs. Clang before version 16 also instantiates member
# functions whose constraints are not met, so its programs compile what they use from the headers.
set(spillway_instantiates TRUE)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 16)
  set(spillway_instantiates FALSE)
endif()

# spillway_leave_out(<option> <part> <missing>): reports that a part of the build is left out because <missing>
# was not found. It is an error if the part was asked for by name, that is, if <option> is ON, not AUTO.
function(spillway_leave_out option part missing)
  if(${option} STREQUAL "AUTO")
    message(STATUS "Left out for want of ${missing}: ${part}; ${spillway_install_hint}")
  else()
    message(FATAL_ERROR "${option} is ${${option}}, but ${part} needs ${missing}; ${spillway_install_hint}")
  endif()
endfunction()

# spillway_compile_options(<target>): the one place that names warning and sanitizer flags.
function(spillway_compile_options target)
  set(cxx -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow)
  set(cuda -Xcompiler=-Wall,-Wextra,-Wshadow)
  if(SPILLWAY_WARNINGS_AS_ERRORS)
    list(APPEND cxx -Werror)
    list(APPEND cuda "SHELL:-Werror all-warnings")
  endif()
  if(SPILLWAY_SANITIZE)
    list(JOIN SPILLWAY_SANITIZE "," sanitizers)
    list(APPEND cxx -fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${target} PRIVATE -fsanitize=${sanitizers})
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${cxx}>"
                                           "$<$<COMPILE_LANGUAGE:CUDA>:${cuda}>")
endfunction()

# spillway_add_program(<name> SOURCES <file>... [LIBRARIES <target>...]): adds a program in BUILD/bin. <name> is
# the name of the target and of the file. The program is left out if it has a .cu source and nvcc was not found, or
# if a library was not found. Each folder sets spillway_option to the option that asks for its programs.
function(spillway_add_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LIBRARIES")
  if(arg_SOURCES MATCHES "\\.cu(;|$)" AND NOT SPILLWAY_HAS_NVCC)
    message(STATUS "Left out for want of nvcc: ${name}")
    return()
  endif()
  foreach(library IN LISTS arg_LIBRARIES)
    if(library MATCHES "::" AND NOT TARGET ${library})
      spillway_leave_out(${spillway_option} ${name} ${library})
      return()
    endif()
  endforeach()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE spillway_cuda ${arg_LIBRARIES})  # the same as spillway if there is no CUDA
  spillway_compile_options(${name})
endfunction()
