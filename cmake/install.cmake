# Headers, library and octavoConfig.cmake, for `cmake --install` and for the wheel alike.

include(CMakePackageConfigHelpers)

if(SKBUILD)
  set(CMAKE_INSTALL_LIBDIR lib)  # octavo.get_cmake_dir() counts on it
endif()
set(_octavo_cmake_dir "${CMAKE_INSTALL_LIBDIR}/cmake/octavo")

install(TARGETS octavo EXPORT octavoTargets
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(DIRECTORY include/octavo "${PROJECT_BINARY_DIR}/include/octavo"
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.h")
install(EXPORT octavoTargets NAMESPACE octavo:: DESTINATION "${_octavo_cmake_dir}")

# The static CUDA runtime goes beside liboctavo.a, so that a C++ program links on a machine without a toolkit.
# It is on the list of files that NVIDIA's licence lets others distribute (see NOTICE). A project that has
# found its own toolkit links that one's runtime instead: octavoConfig.cmake.in. liboctavo.so has the runtime
# inside, where no other sees it.
if(BUILD_SHARED_LIBS)
  set(_octavo_links_cudart OFF)
else()
  set(_octavo_links_cudart "${OCTAVO_HAS_CUDA}")
endif()
if(_octavo_links_cudart)
  install(FILES "$<TARGET_FILE:CUDA::cudart_static>" DESTINATION "${CMAKE_INSTALL_LIBDIR}/octavo")
  set(OCTAVO_CUDA_VERSION "${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR}")
endif()

set(_octavo_cudart_dir "${CMAKE_INSTALL_LIBDIR}/octavo")
configure_package_config_file(cmake/octavoConfig.cmake.in "${PROJECT_BINARY_DIR}/octavoConfig.cmake"
  INSTALL_DESTINATION "${_octavo_cmake_dir}" PATH_VARS _octavo_cudart_dir)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/octavoConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/octavoConfig.cmake" "${PROJECT_BINARY_DIR}/octavoConfigVersion.cmake"
  DESTINATION "${_octavo_cmake_dir}")
