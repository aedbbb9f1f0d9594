option(MUSTER_BUILD_TESTS "Build the C++ tests" ON)
option(MUSTER_BUILD_TORCH "Build muster::torch (needs libtorch)" ON)
option(MUSTER_BUILD_PYTHON "Build the Python extension (needs torch and Python headers)" OFF)
option(MUSTER_BUILD_FUZZERS "Build the fuzz targets (clang: libFuzzer; otherwise a seeded mutator)" ON)
option(MUSTER_WERROR "Treat warnings as errors, as CI does" OFF)
# Headers take most of the time of compiling any file. Preset "tidy" turns this off.
option(CMAKE_UNITY_BUILD "Compile ten files together" ON)
set(CMAKE_UNITY_BUILD_BATCH_SIZE 10)
set(MUSTER_SANITIZE "" CACHE STRING "Sanitizers to build with: address,undefined or thread")

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

# ccache makes a second build cheap; without folders in its hash, all clones and build folders share its entries. It
# caches what uses a precompiled header only when told that nothing there depends on the time of day.
find_program(MUSTER_CCACHE ccache)
if(MUSTER_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_NOHASHDIR=1 CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}
      CCACHE_SLOPPINESS=pch_defines,time_macros ${MUSTER_CCACHE})
endif()

# Some eighty programs are linked; mold takes a sixth of GNU ld's time for each.
include(CheckLinkerFlag)
check_linker_flag(CXX -fuse-ld=mold MUSTER_MOLD)
if(MUSTER_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

add_library(muster_flags INTERFACE)
target_compile_options(muster_flags INTERFACE -Wall -Wextra -Wno-missing-field-initializers)
if(MUSTER_WERROR)
  target_compile_options(muster_flags INTERFACE -Werror)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")  # 12 warns of its own std::string::operator+ where it is inlined
    target_compile_options(muster_flags INTERFACE -Wno-error=restrict)
  endif()
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")  # by default it collects garbage for a seventh of its time
  target_compile_options(muster_flags INTERFACE --param=ggc-min-heapsize=524288 --param=ggc-min-expand=100)
endif()
# Messages of failed checks name files as src/muster/..., not as paths of the machine that built them. The compiler
# cache can then serve a copy of this folder, too.
add_compile_options(-fmacro-prefix-map=${CMAKE_SOURCE_DIR}/=)
if(MUSTER_SANITIZE)
  target_compile_options(muster_flags INTERFACE -fsanitize=${MUSTER_SANITIZE} -fno-omit-frame-pointer -g1)
  target_link_options(muster_flags INTERFACE -fsanitize=${MUSTER_SANITIZE})
endif()
