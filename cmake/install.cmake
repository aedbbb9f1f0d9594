# What `cmake --install` gives: headers, static libraries and the package that find_package(muster) reads (component
# "development"), and the `muster` binary ("runtime"). A wheel takes only what is in the component "python".
if(TARGET muster)
  if(SKBUILD)
    install(TARGETS muster DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT python)
  else()
    include(GNUInstallDirs)
    install(TARGETS muster DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime)
  endif()
endif()
if(SKBUILD)
  if(MUSTER_SHARED_OPENSSL)
    install(FILES ${MUSTER_SHARED_OPENSSL} DESTINATION muster COMPONENT python)
  endif()
  return()
endif()

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/muster)

# muster::core is every library that knows no torch; the launcher's own code stays inside the binary.
get_property(core_libraries GLOBAL PROPERTY MUSTER_LIBRARIES)
list(REMOVE_ITEM core_libraries muster_torch muster_launch muster_cli)
add_library(muster_core INTERFACE)
add_library(muster::core ALIAS muster_core)
target_link_libraries(muster_core INTERFACE ${core_libraries})

function(install_component component)
  foreach(target IN LISTS ARGN)
    string(REGEX REPLACE "^muster_" "" export_name ${target})
    set_target_properties(${target} PROPERTIES EXPORT_NAME ${export_name})
  endforeach()
  install(TARGETS ${ARGN} EXPORT muster-${component} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
  install(EXPORT muster-${component} NAMESPACE muster:: DESTINATION ${package_dir} COMPONENT development)
endfunction()

install_component(core muster_core ${core_libraries})
set(without_torch REGEX "/muster/(torch|launch|cli)$" EXCLUDE)
install(DIRECTORY src/muster DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development
        FILES_MATCHING PATTERN "*.h" ${without_torch})
if(TARGET muster_torch)
  install_component(torch muster_torch)
  install(DIRECTORY src/muster/torch DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/muster COMPONENT development
          FILES_MATCHING PATTERN "*.h")
endif()

configure_package_config_file(cmake/muster-config.cmake.in ${PROJECT_BINARY_DIR}/muster-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/muster-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/muster-config.cmake ${PROJECT_BINARY_DIR}/muster-config-version.cmake
              cmake/hiredis.cmake cmake/libtorch.cmake
        DESTINATION ${package_dir} COMPONENT development)
