# SPDX-License-Identifier: Apache-2.0
# spillway::io_uring, where liburing is found: the library with io_uring for the file tier. Used by the
# project and, installed, by its package.
find_path(SPILLWAY_LIBURING_INCLUDE_DIR liburing.h)
find_library(SPILLWAY_LIBURING_LIBRARY uring)
mark_as_advanced(SPILLWAY_LIBURING_INCLUDE_DIR SPILLWAY_LIBURING_LIBRARY)
if(SPILLWAY_LIBURING_INCLUDE_DIR AND SPILLWAY_LIBURING_LIBRARY AND NOT TARGET spillway::io_uring)
  add_library(spillway::io_uring INTERFACE IMPORTED)
  target_include_directories(spillway::io_uring SYSTEM INTERFACE ${SPILLWAY_LIBURING_INCLUDE_DIR})
  target_link_libraries(spillway::io_uring INTERFACE spillway::spillway ${SPILLWAY_LIBURING_LIBRARY})
  target_compile_definitions(spillway::io_uring INTERFACE SPILLWAY_WITH_IO_URING=1)
endif()
