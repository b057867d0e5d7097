#ifndef FLASHRT_BEHAVIORTREE__CAPSULE_SERVICES_HPP_
#define FLASHRT_BEHAVIORTREE__CAPSULE_SERVICES_HPP_

#include <cstdint>
#include <memory>
#include <string>

#include "flashrt_behaviortree/seconds.hpp"
#include "flashrt_ros/srv/restore_capsule.hpp"
#include "flashrt_ros/srv/rollback.hpp"
#include "flashrt_ros/srv/save_capsule.hpp"
#include "nav2_behavior_tree/bt_service_node.hpp"

namespace flashrt_behaviortree
{

/**
 * @brief Freeze a session's state under a name.
 *
 * SUCCESS: the capsule exists. FAILURE: the response carries a code, or none came within
 * `server_timeout`: the base class knows only the latter, so each node here looks at the code.
 *
 * <FlashrtSaveCapsule capsule="before_grasp" overwrite="true" tokens="{tokens}"/>
 */
class SaveCapsuleService : public nav2_behavior_tree::BtServiceNode<flashrt_ros::srv::SaveCapsule>
{
  using Service = flashrt_ros::srv::SaveCapsule;

public:
  SaveCapsuleService(
    const std::string & xml_tag_name, const BT::NodeConfiguration & conf,
    const std::string & service_name)
  : BtServiceNode<Service>(xml_tag_name, conf, service_name) {}

  void on_tick() override
  {
    *request_ = Service::Request();
    getInput("session", request_->session);
    getInput("capsule", request_->capsule);
    getInput("overwrite", request_->overwrite);
    getInput("pin", request_->pin);
    getInput("persist", request_->persist);
    getInput("note", request_->note);
    double timeout = 0.0;
    getInput("timeout", timeout);
    request_->timeout = seconds(timeout);
  }

  BT::NodeStatus on_completion(std::shared_ptr<Service::Response> response) override
  {
    setOutput("id", response->info.id);
    setOutput("tokens", response->info.tokens);
    setOutput("error_code_id", response->error_code);
    setOutput("error_msg", response->error_msg);
    return response->error_code == Service::Response::NONE ?
           BT::NodeStatus::SUCCESS : BT::NodeStatus::FAILURE;
  }

  static BT::PortsList providedPorts()
  {
    return providedBasicPorts(
      {
        BT::InputPort<std::string>("session", "'' is the default session"),
        BT::InputPort<std::string>("capsule", "Name to give"),
        BT::InputPort<bool>("overwrite", "Replace a capsule of that name"),
        BT::InputPort<bool>("pin", "Never evict it"),
        BT::InputPort<bool>("persist", "Write it to the node's directory too"),
        BT::InputPort<std::string>("note", "Free text, kept with the capsule"),
        BT::InputPort<double>("timeout", "Seconds; 0: the node's parameter"),
        BT::OutputPort<std::string>("id", "Id of the capsule"),
        BT::OutputPort<uint64_t>("tokens", "Position that it restores to"),
        BT::OutputPort<uint16_t>("error_code_id", "0 is success; see flashrt_ros/msg/ErrorCode"),
        BT::OutputPort<std::string>("error_msg", "A sentence that says what to do next"),
      });
  }
};

/**
 * @brief Make a capsule the live state of a session.
 *
 * SUCCESS: every live byte is the one that was saved. FAILURE: as above; the session is as it was.
 *
 * <FlashrtRestoreCapsule capsule="before_grasp" preempt="true"/>
 */
class RestoreCapsuleService
  : public nav2_behavior_tree::BtServiceNode<flashrt_ros::srv::RestoreCapsule>
{
  using Service = flashrt_ros::srv::RestoreCapsule;

public:
  RestoreCapsuleService(
    const std::string & xml_tag_name, const BT::NodeConfiguration & conf,
    const std::string & service_name)
  : BtServiceNode<Service>(xml_tag_name, conf, service_name) {}

  void on_tick() override
  {
    *request_ = Service::Request();
    getInput("session", request_->session);
    getInput("capsule", request_->capsule);
    getInput("reseed", request_->reseed);
    getInput("seed", request_->seed);
    bool preempt = false;
    getInput("preempt", preempt);
    request_->on_busy = preempt ? Service::Request::PREEMPT : Service::Request::DEFAULT;
    getInput("expected_epoch", request_->expected_epoch);
    double timeout = 0.0;
    getInput("timeout", timeout);
    request_->timeout = seconds(timeout);
  }

  BT::NodeStatus on_completion(std::shared_ptr<Service::Response> response) override
  {
    setOutput("tokens", response->tokens_reused);
    setOutput("epoch", response->epoch);
    setOutput("error_code_id", response->error_code);
    setOutput("error_msg", response->error_msg);
    return response->error_code == Service::Response::NONE ?
           BT::NodeStatus::SUCCESS : BT::NodeStatus::FAILURE;
  }

  static BT::PortsList providedPorts()
  {
    return providedBasicPorts(
      {
        BT::InputPort<std::string>("session", "'' is the default session"),
        BT::InputPort<std::string>("capsule", "Name or id"),
        BT::InputPort<bool>("reseed", "Give the sampler the seed"),
        BT::InputPort<uint64_t>("seed", "Read only with reseed"),
        BT::InputPort<bool>("preempt", "End a goal that runs in the session"),
        BT::InputPort<uint64_t>("expected_epoch", "Refuse in another epoch; 0: any"),
        BT::InputPort<double>("timeout", "Seconds; 0: the node's parameter"),
        BT::OutputPort<uint64_t>("tokens", "Position of the session now"),
        BT::OutputPort<uint64_t>("epoch", "New epoch of the session"),
        BT::OutputPort<uint16_t>("error_code_id", "0 is success; see flashrt_ros/msg/ErrorCode"),
        BT::OutputPort<std::string>("error_msg", "A sentence that says what to do next"),
      });
  }
};

/**
 * @brief Take a session back in its own history.
 *
 * Give `position`, `tokens` or `turns`; the first that is there counts. SUCCESS: the session stands
 * exactly there. FAILURE: as above; the session is as it was.
 *
 * <FlashrtRollback turns="1" position_now="{position}"/>
 */
class RollbackService : public nav2_behavior_tree::BtServiceNode<flashrt_ros::srv::Rollback>
{
  using Service = flashrt_ros::srv::Rollback;

public:
  RollbackService(
    const std::string & xml_tag_name, const BT::NodeConfiguration & conf,
    const std::string & service_name)
  : BtServiceNode<Service>(xml_tag_name, conf, service_name) {}

  void on_tick() override
  {
    *request_ = Service::Request();
    getInput("session", request_->session);
    if (getInput("position", request_->value)) {
      request_->to = Service::Request::POSITION;
    } else if (getInput("tokens", request_->value)) {
      request_->to = Service::Request::TOKENS;
    } else if (getInput("turns", request_->value)) {
      request_->to = Service::Request::TURNS;
    } else {
      setOutput("error_msg", std::string("Give position, tokens or turns."));
      should_send_request_ = false;
    }
    getInput("expected_epoch", request_->expected_epoch);
    getInput("max_replay", request_->max_replay);
  }

  BT::NodeStatus on_completion(std::shared_ptr<Service::Response> response) override
  {
    setOutput("position_now", response->position);
    setOutput("epoch", response->epoch);
    setOutput("tokens_replayed", response->tokens_replayed);
    setOutput("error_code_id", response->error_code);
    setOutput("error_msg", response->error_msg);
    return response->error_code == Service::Response::NONE ?
           BT::NodeStatus::SUCCESS : BT::NodeStatus::FAILURE;
  }

  static BT::PortsList providedPorts()
  {
    return providedBasicPorts(
      {
        BT::InputPort<std::string>("session", "'' is the default session"),
        BT::InputPort<uint64_t>("position", "To this position"),
        BT::InputPort<uint64_t>("tokens", "That many tokens back"),
        BT::InputPort<uint64_t>("turns", "That many turns back"),
        BT::InputPort<uint64_t>("expected_epoch", "Refuse in another epoch; 0: any"),
        BT::InputPort<uint32_t>("max_replay", "Most tokens to replay"),
        BT::OutputPort<uint64_t>("position_now", "Where the session stands now"),
        BT::OutputPort<uint64_t>("epoch", "New epoch of the session"),
        BT::OutputPort<uint64_t>("tokens_replayed", "How many were replayed"),
        BT::OutputPort<uint16_t>("error_code_id", "0 is success; see flashrt_ros/msg/ErrorCode"),
        BT::OutputPort<std::string>("error_msg", "A sentence that says what to do next"),
      });
  }
};

}  // namespace flashrt_behaviortree

#endif  // FLASHRT_BEHAVIORTREE__CAPSULE_SERVICES_HPP_
