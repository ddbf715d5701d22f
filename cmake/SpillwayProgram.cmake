# SPDX-License-Identifier: Apache-2.0
# What tests, examples and benchmarks share. Nothing here touches the exported target.

set(spillway_install_hint "scripts/install-dependencies.sh installs what is missing")

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

# spillway_runs_long(<target>): optimises a program that takes longer to run with sanitizers than to
# compile. All others are not, in a build without a type.
function(spillway_runs_long target)
  if(SPILLWAY_SANITIZE)
    target_compile_options(${target} PRIVATE $<$<AND:$<CONFIG:>,$<COMPILE_LANGUAGE:CXX>>:-O1>)
  endif()
endfunction()

# spillway_add_program(<name> SOURCES <file>... [LIBRARIES <target>...]): one program in BUILD/bin.
# <name> is the target and the file. It is left out where a .cu source has no compiler.
function(spillway_add_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LIBRARIES")
  if(arg_SOURCES MATCHES "\\.cu(;|$)" AND NOT SPILLWAY_HAS_NVCC)
    message(STATUS "Left out for want of nvcc: ${name}")
    return()
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE spillway::spillway ${arg_LIBRARIES})
  spillway_compile_options(${name})
endfunction()
