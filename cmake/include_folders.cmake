# Include folders that would end CMake's generate step with an error, though nothing needs them:
#
# - the targets that ROS 2 message wheels export name the Python headers of their build machine,
#   which do not exist here;
# - a virtual environment inside the source folder puts NumPy's headers there, and an exported
#   target must not name a folder of the source tree.
#
# Only the targets of this build are changed, after everything was found; no installed file is
# touched. With colcon on a robot there is nothing to change.

function(_flashrt_clean_includes)
  get_directory_property(_imported IMPORTED_TARGETS)
  foreach(_target IN LISTS _imported)
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

  get_directory_property(_own BUILDSYSTEM_TARGETS)
  foreach(_target IN LISTS _own)
    get_target_property(_folders ${_target} INTERFACE_INCLUDE_DIRECTORIES)
    if(_folders)
      set(_kept "")
      foreach(_folder IN LISTS _folders)
        string(FIND "${_folder}" "${CMAKE_CURRENT_SOURCE_DIR}/" _at)
        if(_at EQUAL 0)
          set(_folder "$<BUILD_INTERFACE:${_folder}>")
        endif()
        list(APPEND _kept "${_folder}")
      endforeach()
      set_target_properties(${_target} PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${_kept}")
    endif()
  endforeach()
endfunction()

# Call after find_package(ament_cmake), which tells the prefix that is built on.
function(flashrt_use_prefix)
  get_filename_component(_prefix "${ament_cmake_DIR}/../../.." ABSOLUTE)
  file(GLOB _wheels "${_prefix}/lib/python3*/site-packages/ros_ament_cmake-*.dist-info")
  if(_wheels)
    message(STATUS "Building on the ROS 2 wheels in ${_prefix}")
  endif()
  if(CMAKE_VERSION VERSION_GREATER_EQUAL 3.21)
    cmake_language(DEFER DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} CALL _flashrt_clean_includes)
  elseif(_wheels)
    message(FATAL_ERROR "Building on ROS 2 wheels needs CMake 3.21 or newer, this is "
      "${CMAKE_VERSION}. Install a newer one: python3 -m pip install cmake")
  endif()
endfunction()
