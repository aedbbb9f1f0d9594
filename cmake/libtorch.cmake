# Gives muster::libtorch: the target `torch` of find_package(Torch) where there is one, else, for a torch that was built
# for CUDA, its headers and its CPU libraries. Such a torch's own package stops the configuration unless the whole CUDA
# toolkit of its version is there, and muster needs none of it. Also installed, for muster-config.cmake.
function(muster_find_cuda_libtorch)
  string(REPLACE ":" ";" prefixes "${CMAKE_PREFIX_PATH};$ENV{CMAKE_PREFIX_PATH}")
  find_path(config_dir Torch/TorchConfig.cmake PATHS "${Torch_DIR}/.." ${prefixes} PATH_SUFFIXES share/cmake
            NO_DEFAULT_PATH NO_CACHE)
  get_filename_component(torch_dir "${config_dir}/../.." ABSOLUTE)
  if(NOT config_dir OR NOT EXISTS ${torch_dir}/lib/libtorch_cuda.so)
    return()
  endif()
  include(${config_dir}/Torch/TorchConfigVersion.cmake)
  # Not libtorch.so: it holds no code, and brings the CUDA libraries into every link.
  add_library(muster::libtorch INTERFACE IMPORTED)
  target_include_directories(muster::libtorch INTERFACE ${torch_dir}/include
                                                        ${torch_dir}/include/torch/csrc/api/include)
  # As torch's own targets say: some of its headers ask.
  target_compile_definitions(muster::libtorch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO USE_RPC USE_TENSORPIPE)
  target_link_libraries(muster::libtorch INTERFACE ${torch_dir}/lib/libtorch_cpu.so ${torch_dir}/lib/libc10.so)
  set(TORCH_INSTALL_PREFIX ${torch_dir} PARENT_SCOPE)
  set(Torch_VERSION ${PACKAGE_VERSION} PARENT_SCOPE)
endfunction()

macro(muster_link_found_torch)
  if(TARGET torch AND NOT TARGET muster::libtorch)
    add_library(muster::libtorch INTERFACE IMPORTED)
    target_link_libraries(muster::libtorch INTERFACE torch)
  endif()
endmacro()

muster_link_found_torch()
