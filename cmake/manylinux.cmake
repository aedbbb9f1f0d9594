# Builds for each Linux system with glibc 2.28 and the libstdc++ of GCC 8 (manylinux_2_28), against the packages that
# tools/manylinux.py has unpacked: `make wheel MANYLINUX=ON`. All other libraries are linked statically.
set(packages ${CMAKE_CURRENT_LIST_DIR}/../build/manylinux-packages)
get_filename_component(packages ${packages} ABSOLUTE)
set(CMAKE_SYSROOT ${packages})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_LIBRARY_ARCHITECTURE x86_64-linux-gnu)
set(OPENSSL_USE_STATIC_LIBS ON)
# But what a wheel has inside its package shares one copy: seven copies would be half of the wheel.
set(MUSTER_SHARED_OPENSSL ${packages}/libmuster_openssl.so)
set(CMAKE_CXX_FLAGS_INIT "-ffunction-sections -fdata-sections")  # with --gc-sections: half the size
# GCC finds its own libraries where it is installed, so the older ones are named first. -B: the startup code, too.
set(link "-L${packages}/stub -B${packages}/usr/lib/x86_64-linux-gnu -L${packages}/lib/x86_64-linux-gnu")
# Symbols of the static libraries stay inside: torch and Python may load others of the same names.
string(APPEND link " -Wl,--exclude-libs,ALL,--gc-sections ${packages}/manylinux.o")
set(CMAKE_EXE_LINKER_FLAGS_INIT ${link})
set(CMAKE_SHARED_LINKER_FLAGS_INIT ${link})
set(CMAKE_MODULE_LINKER_FLAGS_INIT ${link})
set(CMAKE_CXX_STANDARD_LIBRARIES "-lpthread -ldl")
