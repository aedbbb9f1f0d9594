# find_package(Torch) of a torch that was built for CUDA stops the configuration where there is no CUDA toolkit. muster
# needs none: for such a torch this defines the target `torch` itself, out of its headers and its CPU libraries. Does
# nothing for any other torch, or beside a toolkit: find_package(Torch) serves there. Also installed, for
# muster-config.cmake.
function(muster_define_libtorch_without_toolkit)
  string(REPLACE ":" ";" prefixes "${CMAKE_PREFIX_PATH};$ENV{CMAKE_PREFIX_PATH}")
  find_path(config_dir Torch/TorchConfig.cmake PATHS "${Torch_DIR}/.." ${prefixes} PATH_SUFFIXES share/cmake
            NO_DEFAULT_PATH NO_CACHE)
  get_filename_component(torch_dir "${config_dir}/../.." ABSOLUTE)
  if(NOT config_dir OR NOT EXISTS ${torch_dir}/lib/libtorch_cuda.so)
    return()
  endif()
  find_package(CUDAToolkit QUIET)
  if(CUDAToolkit_FOUND)
    return()
  endif()
  include(${config_dir}/Torch/TorchConfigVersion.cmake)
  message(STATUS "muster: libtorch ${PACKAGE_VERSION} is for CUDA, and there is no toolkit: only its CPU part is "
                 "linked")
  # Not libtorch.so: it holds no code, and brings the CUDA libraries into every link.
  add_library(torch INTERFACE IMPORTED)
  target_include_directories(torch INTERFACE ${torch_dir}/include ${torch_dir}/include/torch/csrc/api/include)
  target_link_libraries(torch INTERFACE ${torch_dir}/lib/libtorch_cpu.so ${torch_dir}/lib/libc10.so)
  set(TORCH_INSTALL_PREFIX ${torch_dir} PARENT_SCOPE)
  set(Torch_VERSION ${PACKAGE_VERSION} PARENT_SCOPE)
  set(Torch_FOUND TRUE PARENT_SCOPE)
endfunction()

if(NOT TARGET torch)
  muster_define_libtorch_without_toolkit()
endif()
