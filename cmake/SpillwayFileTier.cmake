# SPDX-License-Identifier: Apache-2.0
# Targets that add an optional dependency to the library: for the file tier, or for codecs. This file is used by the
# project and is installed with its package. The targets are global, so that a project which includes this one by
# add_subdirectory can link to them. Each target exists if its dependency was found:
#   spillway::io_uring   liburing: several file operations can be in flight at once
#   spillway::cufile     cuFile: bytes are copied directly between a GPU and the file
#   spillway::checksums  the header of xxHash: corrupted bytes are detected
#   spillway::zstd       Zstandard: the codec BytePlanes<Zstd>
#   spillway::lz4        LZ4: the codec BytePlanes<Lz4>
#   spillway::nvcomp     nvCOMP: the codecs CudaBytePlanes<NvcompAns> and CudaBytePlanes<NvcompLz4>
find_path(SPILLWAY_LIBURING_INCLUDE_DIR liburing.h)
find_library(SPILLWAY_LIBURING_LIBRARY uring)
mark_as_advanced(SPILLWAY_LIBURING_INCLUDE_DIR SPILLWAY_LIBURING_LIBRARY)
if(SPILLWAY_LIBURING_INCLUDE_DIR AND SPILLWAY_LIBURING_LIBRARY AND NOT TARGET spillway::io_uring)
  add_library(spillway::io_uring INTERFACE IMPORTED GLOBAL)
  target_include_directories(spillway::io_uring SYSTEM INTERFACE ${SPILLWAY_LIBURING_INCLUDE_DIR})
  target_link_libraries(spillway::io_uring INTERFACE spillway::spillway ${SPILLWAY_LIBURING_LIBRARY})
  target_compile_definitions(spillway::io_uring INTERFACE SPILLWAY_WITH_IO_URING=1)
endif()
find_path(SPILLWAY_CUFILE_INCLUDE_DIR cufile.h HINTS ${CUDAToolkit_INCLUDE_DIRS} /usr/local/cuda/include)
find_library(SPILLWAY_CUFILE_LIBRARY cufile HINTS ${CUDAToolkit_LIBRARY_DIR} /usr/local/cuda/lib64)
mark_as_advanced(SPILLWAY_CUFILE_INCLUDE_DIR SPILLWAY_CUFILE_LIBRARY)
if(SPILLWAY_CUFILE_INCLUDE_DIR AND SPILLWAY_CUFILE_LIBRARY AND NOT TARGET spillway::cufile)
  add_library(spillway::cufile INTERFACE IMPORTED GLOBAL)
  target_include_directories(spillway::cufile SYSTEM INTERFACE ${SPILLWAY_CUFILE_INCLUDE_DIR})
  target_link_libraries(spillway::cufile INTERFACE spillway::spillway ${SPILLWAY_CUFILE_LIBRARY})
  target_compile_definitions(spillway::cufile INTERFACE SPILLWAY_WITH_CUFILE=1)
endif()
find_path(SPILLWAY_XXHASH_INCLUDE_DIR xxhash.h)
mark_as_advanced(SPILLWAY_XXHASH_INCLUDE_DIR)
if(SPILLWAY_XXHASH_INCLUDE_DIR AND NOT TARGET spillway::checksums)
  add_library(spillway::checksums INTERFACE IMPORTED GLOBAL)
  target_include_directories(spillway::checksums SYSTEM INTERFACE ${SPILLWAY_XXHASH_INCLUDE_DIR})
  target_link_libraries(spillway::checksums INTERFACE spillway::spillway)
  target_compile_definitions(spillway::checksums INTERFACE SPILLWAY_WITH_XXHASH=1)
endif()
foreach(compressor IN ITEMS zstd lz4)
  string(TOUPPER ${compressor} name)
  find_path(SPILLWAY_${name}_INCLUDE_DIR ${compressor}.h)
  find_library(SPILLWAY_${name}_LIBRARY ${compressor})
  mark_as_advanced(SPILLWAY_${name}_INCLUDE_DIR SPILLWAY_${name}_LIBRARY)
  if(SPILLWAY_${name}_INCLUDE_DIR AND SPILLWAY_${name}_LIBRARY AND NOT TARGET spillway::${compressor})
    add_library(spillway::${compressor} INTERFACE IMPORTED GLOBAL)
    target_include_directories(spillway::${compressor} SYSTEM INTERFACE ${SPILLWAY_${name}_INCLUDE_DIR})
    target_link_libraries(spillway::${compressor} INTERFACE spillway::spillway ${SPILLWAY_${name}_LIBRARY})
    target_compile_definitions(spillway::${compressor} INTERFACE SPILLWAY_WITH_${name}=1)
  endif()
endforeach()
if(CUDAToolkit_FOUND)  # without it nvCOMP's package warns
  find_package(nvcomp CONFIG QUIET)
endif()
if(TARGET nvcomp::nvcomp AND NOT TARGET spillway::nvcomp)
  add_library(spillway::nvcomp INTERFACE IMPORTED GLOBAL)
  target_link_libraries(spillway::nvcomp INTERFACE spillway::spillway nvcomp::nvcomp)
  target_compile_definitions(spillway::nvcomp INTERFACE SPILLWAY_WITH_NVCOMP=1)
endif()
