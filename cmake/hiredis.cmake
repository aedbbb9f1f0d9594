# Gives muster::hiredis where the library is found: the static one by choice, so that what is built with it runs where
# it is not installed. Also installed, for muster-config.cmake.
find_path(MUSTER_HIREDIS_INCLUDE hiredis/hiredis.h)
find_library(MUSTER_HIREDIS_LIBRARY NAMES libhiredis.a hiredis)
mark_as_advanced(MUSTER_HIREDIS_INCLUDE MUSTER_HIREDIS_LIBRARY)
if(MUSTER_HIREDIS_INCLUDE AND MUSTER_HIREDIS_LIBRARY AND NOT TARGET muster::hiredis)
  add_library(muster::hiredis INTERFACE IMPORTED)
  target_include_directories(muster::hiredis INTERFACE ${MUSTER_HIREDIS_INCLUDE})
  target_link_libraries(muster::hiredis INTERFACE ${MUSTER_HIREDIS_LIBRARY})
endif()
