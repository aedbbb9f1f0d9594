# muster_library(name SOURCES ... LINK ... [PRIVATE_LINK ...]): the one target of one folder of src/muster.
# Every source of the folder must be listed (tools/tidy.py checks it). Alias: muster::<name>.
function(muster_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK;PRIVATE_LINK" ${ARGN})
  add_library(muster_${name} STATIC ${ARG_SOURCES})
  add_library(muster::${name} ALIAS muster_${name})
  target_include_directories(muster_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src> $<INSTALL_INTERFACE:include>)
  target_compile_features(muster_${name} PUBLIC cxx_std_20)
  target_link_libraries(muster_${name} PUBLIC ${ARG_LINK} PRIVATE $<BUILD_INTERFACE:muster_flags>)
  foreach(library IN LISTS ARG_PRIVATE_LINK)
    # Who links the installed library does not need what it was only compiled with.
    if(library MATCHES "^(fmt|spdlog|nlohmann_json|CLI11)::")
      set(library $<BUILD_INTERFACE:${library}>)
    endif()
    target_link_libraries(muster_${name} PRIVATE ${library})
  endforeach()
  set_property(GLOBAL APPEND PROPERTY MUSTER_LIBRARIES muster_${name})
endfunction()

# muster_install_in_wheel(target folder): installs a program or module in a folder of the package.
function(muster_install_in_wheel target folder)
  if(MUSTER_SHARED_OPENSSL)  # it comes before the libraries of other targets, so nothing is taken from static ones
    target_link_libraries(${target} PRIVATE ${MUSTER_SHARED_OPENSSL})
    set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN/..")
  endif()
  install(TARGETS ${target} DESTINATION ${folder} COMPONENT python)
endfunction()

# muster_small_calls(name): for a library whose calls are counted in nanoseconds.
function(muster_small_calls name)
  # Or calls within a file are never inlined, for the code is position independent.
  target_compile_options(muster_${name} PRIVATE -fno-semantic-interposition)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
    # Objects of some 200 bytes are cleared by plain stores: `rep stos` takes 10 ns to begin.
    target_compile_options(muster_${name} PRIVATE -mmemset-strategy=unrolled_loop:512:noalign,libcall:-1:noalign)
  endif()
endfunction()

# muster_test(name SOURCES ... LINK ...): one test program, run by ctest as one test with its own time limit.
function(muster_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;LINK" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  if(MUSTER_SANITIZE OR CMAKE_CROSSCOMPILING)  # cross-compiled tests run under an emulator
    math(EXPR ARG_TIMEOUT "4 * ${ARG_TIMEOUT}")
  endif()
  add_executable(${name} ${ARG_SOURCES})
  # At -O3, compiling the tests takes more time than they save when they run.
  target_compile_options(${name} PRIVATE $<$<NOT:$<CONFIG:Debug>>:-O1>)
  # What every test includes is compiled once, with the first of them. Not where code is optimized: GCC then warns of
  # what it inlined from precompiled system headers.
  get_property(first GLOBAL PROPERTY MUSTER_FIRST_TEST)
  if(first)
    target_precompile_headers(${name} REUSE_FROM ${first})
  elseif(CMAKE_BUILD_TYPE STREQUAL "Debug")
    target_precompile_headers(${name} PRIVATE <gmock/gmock.h> <gtest/gtest.h> <chrono> <thread>)
    set_property(GLOBAL PROPERTY MUSTER_FIRST_TEST ${name})
  endif()
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE ${ARG_LINK} GTest::gtest GTest::gmock GTest::gtest_main muster_flags)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT})
endfunction()
