# Building on ROS 2 wheels: drop include folders that only existed where the wheels were built.
#
# The targets that message wheels export name the Python headers of their build machine. CMake ends
# its generate step with an error for an imported target with a missing include folder, though
# nothing here needs it. The targets of this build are cleaned, after everything was found; no
# installed file is touched. Where ROS was installed otherwise, this does nothing.

function(_flashrt_drop_missing_includes)
  get_directory_property(_targets IMPORTED_TARGETS)
  foreach(_target IN LISTS _targets)
    get_target_property(_folders ${_target} INTERFACE_INCLUDE_DIRECTORIES)
    if(_folders)
      set(_kept "")
      foreach(_folder IN LISTS _folders)
        if(_folder MATCHES "\\$<" OR EXISTS "${_folder}")
          list(APPEND _kept "${_folder}")
        endif()
      endforeach()
      set_target_properties(${_target} PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${_kept}")
    endif()
  endforeach()
endfunction()

# Call after find_package(ament_cmake), which tells the prefix that is built on.
function(flashrt_use_wheel_prefix)
  get_filename_component(_prefix "${ament_cmake_DIR}/../../.." ABSOLUTE)
  file(GLOB _wheels "${_prefix}/lib/python3*/site-packages/ros_wheels_bootstrapper*")
  if(NOT _wheels)
    return()
  endif()
  if(CMAKE_VERSION VERSION_LESS 3.21)
    message(FATAL_ERROR "Building on ROS 2 wheels needs CMake 3.21 or newer, this is "
      "${CMAKE_VERSION}. Install a newer one: python3 -m pip install cmake")
  endif()
  message(STATUS "Building on the ROS 2 wheels in ${_prefix}")
  cmake_language(DEFER DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} CALL _flashrt_drop_missing_includes)
endfunction()
