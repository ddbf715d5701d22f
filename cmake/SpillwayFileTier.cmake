# SPDX-License-Identifier: Apache-2.0
# The library with what the file tier can use besides the system's calls, and with what makes bytes fewer there.
# Used by the project and, installed, by its package.
#   spillway::io_uring   where liburing is found: file calls that are in flight together
#   spillway::checksums  where the header of xxHash is found: corrupted bytes are not given out
#   spillway::zstd       where Zstandard is found: the codec BytePlanes<Zstd>
#   spillway::lz4        where LZ4 is found: the codec BytePlanes<Lz4>
find_path(SPILLWAY_LIBURING_INCLUDE_DIR liburing.h)
find_library(SPILLWAY_LIBURING_LIBRARY uring)
mark_as_advanced(SPILLWAY_LIBURING_INCLUDE_DIR SPILLWAY_LIBURING_LIBRARY)
if(SPILLWAY_LIBURING_INCLUDE_DIR AND SPILLWAY_LIBURING_LIBRARY AND NOT TARGET spillway::io_uring)
  add_library(spillway::io_uring INTERFACE IMPORTED)
  target_include_directories(spillway::io_uring SYSTEM INTERFACE ${SPILLWAY_LIBURING_INCLUDE_DIR})
  target_link_libraries(spillway::io_uring INTERFACE spillway::spillway ${SPILLWAY_LIBURING_LIBRARY})
  target_compile_definitions(spillway::io_uring INTERFACE SPILLWAY_WITH_IO_URING=1)
endif()
find_path(SPILLWAY_XXHASH_INCLUDE_DIR xxhash.h)
mark_as_advanced(SPILLWAY_XXHASH_INCLUDE_DIR)
if(SPILLWAY_XXHASH_INCLUDE_DIR AND NOT TARGET spillway::checksums)
  add_library(spillway::checksums INTERFACE IMPORTED)
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
    add_library(spillway::${compressor} INTERFACE IMPORTED)
    target_include_directories(spillway::${compressor} SYSTEM INTERFACE ${SPILLWAY_${name}_INCLUDE_DIR})
    target_link_libraries(spillway::${compressor} INTERFACE spillway::spillway ${SPILLWAY_${name}_LIBRARY})
    target_compile_definitions(spillway::${compressor} INTERFACE SPILLWAY_WITH_${name}=1)
  endif()
endforeach()
