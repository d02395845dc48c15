# Decides whether CUDA is built, and says what was decided and why. Sets OCTAVO_HAS_CUDA; when it is true,
# the CUDA language is enabled and CUDAToolkit is found; when it is false, OCTAVO_WHY_CPU_ONLY is what the library
# says of itself.
#
# The Python build backend looks for a compiler by itself and passes ON with CMAKE_CUDA_COMPILER, or OFF.

set(OCTAVO_CUDA AUTO CACHE STRING "Build the CUDA backend: ON, OFF, or AUTO (where a CUDA compiler is found)")
set_property(CACHE OCTAVO_CUDA PROPERTY STRINGS AUTO ON OFF)
set(OCTAVO_CUDA_ARCHITECTURES "80-real;90a-real;80-virtual" CACHE STRING
  "GPU architectures, as in CMAKE_CUDA_ARCHITECTURES")
set(OCTAVO_CUDA_REASON "" CACHE STRING "Why the build backend chose this OCTAVO_CUDA")
mark_as_advanced(OCTAVO_CUDA_REASON)

set(_octavo_min_nvcc 12.8)  # --compress-mode

# The first nvcc of: CMAKE_CUDA_COMPILER, CUDACXX, CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda.
function(_octavo_find_nvcc out)
  if(CMAKE_CUDA_COMPILER)
    set(nvcc "${CMAKE_CUDA_COMPILER}")
  elseif(DEFINED ENV{CUDACXX})
    set(nvcc "$ENV{CUDACXX}")
  else()
    find_program(nvcc nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin NO_CACHE)
  endif()
  set(${out} "${nvcc}" PARENT_SCOPE)
endfunction()

# NVIDIA's compiler packages on PyPI unpack to <root>/{bin,include,lib}. Up to CUDA 13.0 their nvcc looks for
# libraries in lib64, and they hold libcudart.so.13 without the libcudart.so that FindCUDAToolkit asks for.
macro(_octavo_use_pypi_layout nvcc)
  get_filename_component(_octavo_root "${nvcc}/../.." ABSOLUTE)
  if(EXISTS "${_octavo_root}/lib/libcudart_static.a" AND NOT EXISTS "${_octavo_root}/lib64")
    set(ENV{LIBRARY_PATH} "${_octavo_root}/lib:$ENV{LIBRARY_PATH}")
    set(CUDAToolkit_ROOT "${_octavo_root}")
    file(GLOB _octavo_cudart "${_octavo_root}/lib/libcudart.so*")
    if(_octavo_cudart)
      list(GET _octavo_cudart 0 _octavo_cudart)
      set(CUDA_CUDART "${_octavo_cudart}" CACHE FILEPATH "The CUDA runtime")
    endif()
  endif()
endmacro()

# Sets `out` to what keeps this nvcc from being used; empty if nothing does.
function(_octavo_why_not nvcc out)
  set(${out} "" PARENT_SCOPE)
  if(NOT nvcc)
    set(${out} "no nvcc found" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE status)
  if(NOT status EQUAL 0 OR NOT text MATCHES "V([0-9]+\\.[0-9]+\\.[0-9]+)")
    set(${out} "${nvcc} --version failed" PARENT_SCOPE)
  elseif(CMAKE_MATCH_1 VERSION_LESS _octavo_min_nvcc)
    set(${out} "${nvcc} is version ${CMAKE_MATCH_1}, and ${_octavo_min_nvcc} is needed" PARENT_SCOPE)
  elseif(OCTAVO_CUDA STREQUAL "AUTO")
    set(CMAKE_CUDA_COMPILER "${nvcc}")
    set(CMAKE_CUDA_ARCHITECTURES "${OCTAVO_CUDA_ARCHITECTURES}")
    include(CheckLanguage)
    check_language(CUDA)
    if(NOT CMAKE_CUDA_COMPILER)
      set(${out} "${nvcc} cannot compile and link a program" PARENT_SCOPE)
    endif()
  endif()
endfunction()

string(TOUPPER "${OCTAVO_CUDA}" OCTAVO_CUDA)
if(NOT OCTAVO_CUDA MATCHES "^(ON|OFF|AUTO)$")
  message(FATAL_ERROR "Octavo: OCTAVO_CUDA must be ON, OFF or AUTO, not ${OCTAVO_CUDA}")
endif()

set(OCTAVO_HAS_CUDA OFF)
if(OCTAVO_CUDA STREQUAL "OFF")
  if(NOT OCTAVO_CUDA_REASON)
    set(OCTAVO_CUDA_REASON "asked for by OCTAVO_CUDA=OFF")
  endif()
  message(STATUS "Octavo: CUDA OFF (${OCTAVO_CUDA_REASON})")
else()
  _octavo_find_nvcc(_octavo_nvcc)
  if(_octavo_nvcc)
    _octavo_use_pypi_layout("${_octavo_nvcc}")
  endif()
  _octavo_why_not("${_octavo_nvcc}" _octavo_why_not)
  if(NOT _octavo_why_not)
    set(OCTAVO_HAS_CUDA ON)
  elseif(OCTAVO_CUDA STREQUAL "ON")
    message(FATAL_ERROR "Octavo: OCTAVO_CUDA=ON, but ${_octavo_why_not}")
  else()
    set(OCTAVO_CUDA_REASON "${_octavo_why_not}")
    message(WARNING
      "Octavo: CUDA OFF: ${_octavo_why_not}. This build serves the CPU only. "
      "OCTAVO_CUDA=ON makes this an error, OCTAVO_CUDA=OFF silences it.")
  endif()
endif()

if(OCTAVO_HAS_CUDA)
  set(CMAKE_CUDA_COMPILER "${_octavo_nvcc}" CACHE FILEPATH "The CUDA compiler")
  set(CMAKE_CUDA_ARCHITECTURES "${OCTAVO_CUDA_ARCHITECTURES}")
  if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX})
    set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit ${_octavo_min_nvcc} REQUIRED)
  if(NOT OCTAVO_CUDA_REASON)
    set(OCTAVO_CUDA_REASON "${CMAKE_CUDA_COMPILER}")
  endif()
  list(JOIN OCTAVO_CUDA_ARCHITECTURES " " _octavo_architectures)
  message(STATUS "Octavo: CUDA ON, nvcc ${CMAKE_CUDA_COMPILER_VERSION} (${OCTAVO_CUDA_REASON}), "
    "architectures ${_octavo_architectures}")
else()
  if(SKBUILD)
    set(_octavo_command "OCTAVO_CUDA=ON pip install .")
  else()
    set(_octavo_command "cmake -DOCTAVO_CUDA=ON")
  endif()
  string(CONCAT OCTAVO_WHY_CPU_ONLY "octavo was built for the CPU only (${OCTAVO_CUDA_REASON}); "
    "to build it with CUDA, run in its repository: ${_octavo_command}")
endif()
