# Finds the libtorch that belongs to the Python interpreter in use, or the one that CMAKE_PREFIX_PATH names.
if(MUSTER_BUILD_PYTHON)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
else()
  find_package(Python 3.10 COMPONENTS Interpreter)
endif()
if(NOT Torch_DIR AND Python_EXECUTABLE)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import torch.utils, sys; sys.stdout.write(torch.utils.cmake_prefix_path)"
    OUTPUT_VARIABLE torch_prefix RESULT_VARIABLE torch_missing ERROR_QUIET)
  if(NOT torch_missing)
    list(APPEND CMAKE_PREFIX_PATH ${torch_prefix})
  endif()
endif()
include(${CMAKE_CURRENT_LIST_DIR}/libtorch.cmake)
muster_find_cuda_libtorch()
if(NOT TARGET muster::libtorch)
  find_package(Torch QUIET)
  muster_link_found_torch()
endif()
if(NOT TARGET muster::libtorch)
  message(FATAL_ERROR "muster::torch needs libtorch: `pip install torch==2.13.0` first, or configure with "
                      "-DMUSTER_BUILD_TORCH=OFF -DMUSTER_BUILD_PYTHON=OFF for the core alone.")
endif()
